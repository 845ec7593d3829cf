"""Write a finished model so that it loads without Thinwire: its weights, and as a program that needs no source."""

import io
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from thinwire.base.errors import ConfigError
from thinwire.base.files import on_file, refuse_link, write_json
from thinwire.factor.convert import copy_of
from thinwire.factor.plain import SETTINGS, is_pair

log = logging.getLogger("thinwire")

_LARGEST_CONSTANT = 64
"""Largest result of constant folding in ONNX: folds shapes, but never the product of two factors."""


def write(
    model: nn.Module,
    folder: Path | str,
    example_input: Any = None,
    *,
    onnx: bool = False,
    views: str | None = None,
) -> Path:
    """Write a finished model: `model.safetensors`, `layers.json`, `load.py`, and `program.pt2` with an example.

    `load.py` needs only torch and safetensors and loads the weights into a model built by your own code;
    `program.pt2` is the model itself, for `torch.export.load`, and `model.onnx` the same for other runtimes. The
    example is a tensor, a tuple of arguments or a mapping of them by name; `views` describes its preprocessing.
    """
    if onnx:
        refuse_onnx(example_input)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "layers.json", "load.py", "program.pt2", "model.onnx"):
        refuse_link(folder / name)
    with on_file(folder / "model.safetensors"):
        save_file(_distinct(model), folder / "model.safetensors")
    layers = {name: about for name, module in model.named_modules() if (about := _describe(module)) is not None}
    parameters = sum(p.numel() for p in model.parameters())
    about = {**describe_inputs(example_input, views), "parameters": parameters, "layers": layers}
    write_json(folder / "layers.json", about)
    shutil.copymode(folder / "layers.json", folder / "model.safetensors")  # else readable by the owner only
    write_loader(folder)
    if example_input is not None:
        write_programs(model, folder, example_input, onnx=onnx)
    return folder


def write_loader(folder: Path) -> None:
    """`load.py`, which loads the other files without Thinwire."""
    (folder / "load.py").write_text((Path(__file__).parent / "load_exported.py").read_text())


def describe_inputs(example: Any, views: str | None = None) -> dict[str, Any]:
    """The model's inputs for `layers.json`, as far as known: a list of arguments or a mapping."""
    about: dict[str, Any] = {}
    if example is not None:
        args, keywords = arguments(example)
        about["inputs"] = {name: _input(x) for name, x in keywords.items()} if keywords else [_input(x) for x in args]
    return about | ({} if views is None else {"views": views})


def _input(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return {
        "shape": ["batch", *value.shape[1:]] if value.dim() else [],
        "dtype": str(value.dtype).removeprefix("torch."),
    }


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with tied weights once, under their first name."""
    first: dict[Any, str] = {}
    state = model.state_dict()
    for name, t in state.items():
        first.setdefault((t.data_ptr(), t.shape, t.stride()) if t.numel() else name, name)
    return {name: state[name].detach().cpu().contiguous().clone() for name in first.values()}


def _describe(module: Any) -> dict[str, Any] | None:
    """How `load.py` builds a low-rank layer; None for any other."""
    if is_pair(module):
        return {"kind": "sequential", "parts": [_plain_layer(part) for part in module]}
    if not parametrize.is_parametrized(module):
        return None
    lists = module.parametrizations.items()
    weights = {name: list(found.original.shape) for name, found in lists if getattr(found[0], "low_rank", False)}
    return {"kind": "parametrized", "weights": weights} if weights else None


def _plain_layer(layer: Any) -> dict[str, Any]:
    """The class and the arguments that `load.py` builds it with."""
    linear, convolution = ("in_features", "out_features"), ("in_channels", "out_channels", "kernel_size", *SETTINGS)
    given = {key: getattr(layer, key) for key in (linear if isinstance(layer, nn.Linear) else convolution)}
    return {"class": type(layer).__name__, "arguments": {**given, "bias": layer.bias is not None}}


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from inputs: a tensor, a tuple, or a mapping by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def refuse_onnx(example: Any) -> None:
    """Raise if ONNX cannot be written, before any file is."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"writing ONNX needs the package {' and '.join(missing)}: pip install 'thinwire[onnx]'")
    if example is None:
        raise ConfigError("writing ONNX needs an example input of the model; give one")


def write_programs(model: nn.Module, folder: Path, example: Any, *, onnx: bool) -> None:
    """Trace the model on `example` and write the program, for any batch size.

    If a model cannot be traced, it warns and writes no program.
    """
    content = io.BytesIO()  # torch.export.save into a file aborts the process if the disk is full
    try:
        program = _trace(_prepared(model), example)
        torch.export.save(program, content)
    except Exception as error:  # any: torch.export runs the model's own code
        if onnx:
            raise _no_onnx(error) from error
        log.warning("no program.pt2: torch.export cannot trace this model (%s)", _cause(error))
        return
    with on_file(folder / "program.pt2"):
        (folder / "program.pt2").write_bytes(content.getbuffer())
    if onnx:
        _write_onnx(program, folder / "model.onnx")


def _prepared(model: nn.Module) -> nn.Module:
    """A copy that returns plain tensors: transformers' models return output objects with a cache."""
    model = copy_of(model).cpu().eval()
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # type: ignore[union-attr]
    model.register_forward_hook(lambda module, given, found: getattr(found, "to_tuple", lambda: found)())
    return model


def _trace(model: nn.Module, example: Any) -> torch.export.ExportedProgram:
    args, keywords = arguments(tree_map(_batch, example))
    shapes: Any = tree_map(_shape, keywords) if keywords else tree_map(_shape, args)
    with warnings.catch_warnings():
        # A weight computed by a hook is such an attribute; the program computes it too.
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
        return torch.export.export(model, args, keywords, dynamic_shapes=shapes)


def _batch(value: Any) -> Any:
    """On the CPU, with at least two examples: a batch size of 1 would be specialised as a constant."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    value = value.detach().cpu()
    return torch.cat([value, value])[: max(2, len(value))]


def _shape(value: Any) -> Any:
    return {0: torch.export.Dim.AUTO} if isinstance(value, Tensor) and value.dim() else None


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program as ONNX."""
    try:
        with _quiet():
            found = torch.onnx.export(program, (), dynamo=True, verbose=False, optimize=False)
            assert found is not None
            _optimize(found.model)
    except Exception as error:  # any: the exporter has no common error class
        raise _no_onnx(error) from error
    found.save(path)  # weights over 2 GB go to a separate file


def _optimize(model: Any) -> None:
    from onnxscript.optimizer import optimize

    optimize(model, output_size_limit=_LARGEST_CONSTANT)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # source lines and paths, a third of a small file


def _no_onnx(error: BaseException) -> ConfigError:
    return ConfigError(f"the model cannot be written as ONNX: {_cause(error)}; leave it out to get the other files")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence deprecation warnings and notices of torch.onnx."""
    notices = logging.getLogger("torch.onnx")
    level = notices.level
    notices.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    notices.setLevel(level)


def _cause(error: BaseException) -> str:
    """The first line of the original error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
