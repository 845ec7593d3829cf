"""Convert a factored model to plain torch.nn layers, and write it so that it loads without Thinwire.

Linear and convolutions become two layers in an `nn.Sequential`. Where other code reads `.weight` itself
(MultiheadAttention, TransformerEncoderLayer, unknown classes), the weight is parametrized by an `nn.Linear`: stored
as factors, multiplied out when read.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.base.files import on_file, refuse_link
from thinwire.factor.layers import (
    dense_class,
    factored_names,
    factors_of,
    forget_reading,
    is_conv1d_of_transformers,
    unfactor_weight,
    weight_was_read,
)
from thinwire.factor.matrix import product
from thinwire.factor.program import arguments, refuse_onnx, write_programs

Plain = Callable[..., nn.Module]
_READS_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def to_plain(model: nn.Module, plain: Plain | None = None) -> nn.Module:
    """Replace every factored layer in `model`; the root may be a different module afterwards.

    `plain` makes a plain layer of a factored one, where that takes more than `plain_layer`.
    """
    plain = plain or plain_layer
    for module in list(model.modules()):
        parent_reads = isinstance(module, _READS_WEIGHTS_OF_CHILDREN)
        for name, child in list(module.named_children()):
            if factored_names(child):
                setattr(module, name, plain(child, in_place=parent_reads))
    found = plain(model, in_place=False) if factored_names(model) else model
    for module in found.modules():
        forget_reading(module)
    return found


def plain_layer(module: nn.Module, *, in_place: bool) -> nn.Module:
    """A factored layer in plain ones; `in_place` it is the same module, and computes its weight when it is read."""
    dense = dense_class(module)
    if not (in_place or weight_was_read(module)) and tuple(factored_names(module)) == ("weight",):
        if dense is nn.Linear:
            return _two_linears(module)
        if dense in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            return _two_convolutions(module, dense)
        if is_conv1d_of_transformers(dense):
            return _two_linears(module, weight_is_transposed=True)
    # Restore all weights before parametrizing any: both change the module's class.
    found = {name: (*_sides(module, name), view.shape) for name, view in factored_names(module).items()}
    for name, (left, _, _) in found.items():
        unfactor_weight(module, name, nn.Parameter(left.clone(memory_format=torch.contiguous_format)))
    for name, (_, right, shape) in found.items():
        _parametrize(module, name, right, shape)
    return module


def _sides(module: nn.Module, name: str = "weight") -> tuple[Tensor, Tensor]:
    """(rows, k) and (k, columns) of the flattened weight."""
    first, *rest = (p.detach() for p in factors_of(module, name))
    left, right = factored_names(module)[name].sides(first, product(rest))
    return left, right


def _two_linears(module: Any, *, weight_is_transposed: bool = False) -> nn.Sequential:
    left, right = _sides(module)
    if weight_is_transposed:
        left, right = right.t(), left.t()  # (out, k), (k, in)
    first = nn.Linear(right.shape[1], right.shape[0], bias=False)
    second = nn.Linear(left.shape[1], left.shape[0], bias=module.bias is not None)
    _fill(first, right)
    _fill(second, left, module.bias)
    return _marked(nn.Sequential(first, second).train(module.training))


def _two_convolutions(module: Any, dense: type[Any]) -> nn.Sequential:
    left, right = _sides(module)
    rank = left.shape[1]
    settings = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "padding_mode")}
    first = dense(module.in_channels, rank, module.kernel_size, bias=False, **settings)
    second = dense(rank, module.out_channels, 1, bias=module.bias is not None)
    _fill(first, right)
    _fill(second, left, module.bias)
    return _marked(nn.Sequential(first, second).train(module.training))


def _fill(layer: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    layer.weight = nn.Parameter(weight.reshape(layer.weight.shape).clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)


def _parametrize(module: nn.Module, name: str, right: Tensor, shape: tuple[int, ...]) -> None:
    """The weight as Linear(left): left (rows, k) times the Linear's weight (columns, k) transposed."""
    spread: nn.Module = nn.Linear(right.shape[0], right.shape[1], bias=False)
    _fill(spread, right.t())
    if len(shape) > 2:
        spread = nn.Sequential(spread, nn.Unflatten(1, shape[1:]))
    parametrize.register_parametrization(module, name, _marked(spread), unsafe=True)


def _marked(module: Any) -> Any:
    """Mark it, to distinguish it from the user's own Sequentials and parametrizations."""
    module.low_rank = True
    return module


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
    with on_file(folder / "layers.json"):
        (folder / "layers.json").write_text(json.dumps(about, indent=1) + "\n")
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


def _describe(module: nn.Module) -> dict[str, Any] | None:
    """How `load.py` builds a low-rank layer; None for any other."""
    if isinstance(module, nn.Sequential) and getattr(module, "low_rank", False) and not _is_spread(module):
        return {"kind": "sequential", "parts": [_arguments(part) for part in module]}
    if not parametrize.is_parametrized(module):
        return None
    lists = module.parametrizations.items()  # type: ignore[union-attr,operator]
    weights = {name: list(found.original.shape) for name, found in lists if getattr(found[0], "low_rank", False)}
    return {"kind": "parametrized", "weights": weights} if weights else None


def _is_spread(module: nn.Sequential) -> bool:
    return isinstance(module[-1], nn.Unflatten)


def _arguments(layer: Any) -> dict[str, Any]:
    keys: tuple[str, ...] = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "padding_mode",
    )
    if isinstance(layer, nn.Linear):
        keys = ("in_features", "out_features")
    given = {key: getattr(layer, key) for key in keys}
    return {"class": type(layer).__name__, "arguments": {**given, "bias": layer.bias is not None}}
