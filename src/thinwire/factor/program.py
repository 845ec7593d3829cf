"""A finished model as a program that runs without its own code: `program.pt2`, and `model.onnx` where asked for."""

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

from thinwire.errors import ConfigError, DamagedError
from thinwire.factor.hooked import copy_of

log = logging.getLogger("thinwire")

_LARGEST_CONSTANT = 64
"""Numbers that may be computed ahead in ONNX: shapes and the like, and never the product of two factors."""


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with these inputs: a tensor, a tuple of arguments, or a mapping of them by name."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def refuse_onnx(example: Any) -> None:
    """Raise where ONNX cannot be written, before anything else is."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"writing ONNX needs the package {' and '.join(missing)}: pip install 'thinwire[onnx]'")
    if example is None:
        raise ConfigError("writing ONNX needs an example of the model's input, and none is known; give one")


def write_programs(model: nn.Module, folder: Path, example: Any, *, onnx: bool) -> None:
    """Write the model as it runs on `example`, for batches of any size.

    Not every model can be traced. Then there is no program, and the other files are what there is.
    """
    try:
        program = _trace(_prepared(model), example)
        torch.export.save(program, folder / "program.pt2")
    except Exception as error:  # of any kind: torch's compiler runs the model's own code
        if onnx:
            raise _no_onnx(error) from error
        log.warning("no program.pt2: torch.export cannot follow this model (%s)", _told(error))
        return
    if onnx:
        write_onnx(program, folder / "model.onnx")


def read_program(path: Path) -> torch.export.ExportedProgram:
    """A program as it was written."""
    try:
        return torch.export.load(path)
    except Exception as error:  # of any kind: it is a zip file with JSON inside
        raise DamagedError(f"`{path}` is damaged ({_told(error)}); restore it, or write the model again") from error


def _prepared(model: nn.Module) -> nn.Module:
    """A copy that gives plain tensors: transformers' models else return objects of their own, with a cache inside."""
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
        # A weight that a hook computes is such an attribute; the program computes it too.
        warnings.filterwarnings("ignore", "The tensor attributes? .* assigned during export")
        return torch.export.export(model, args, keywords, dynamic_shapes=shapes)


def _batch(value: Any) -> Any:
    """On the CPU, and two examples at least: a batch of one would be taken for a constant."""
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
    except Exception as error:  # of any kind: it has no common one for what it cannot write
        raise _no_onnx(error) from error
    found.save(path)  # weights of more than 2 GB lie in a file beside it


def _optimize(model: Any) -> None:
    from onnxscript.optimizer import optimize

    optimize(model, output_size_limit=_LARGEST_CONSTANT)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # lines of source with their paths, a third of a small file


def _no_onnx(error: BaseException) -> ConfigError:
    return ConfigError(f"the model cannot be written as ONNX: {_told(error)}; leave it out to have the other files")


@contextmanager
def _quiet() -> Iterator[None]:
    """No notices of torch about its own future, nor about packages that nobody asked for."""
    notices = logging.getLogger("torch.onnx")
    level = notices.level
    notices.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    notices.setLevel(level)


def _told(error: BaseException) -> str:
    """The first line of what went wrong in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
