"""Export a finished model as a program that runs without its source: `program.pt2`, and `model.onnx` on request."""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thinwire.base.errors import ConfigError
from thinwire.base.files import on_file
from thinwire.factor.convert import copy_of

log = logging.getLogger("thinwire")

_LARGEST_CONSTANT = 64
"""Largest result of constant folding in ONNX: folds shapes, but never the product of two factors."""


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
        write_onnx(program, folder / "model.onnx")


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


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
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
