"""Checks before the first step: optimizers, architecture, initial values, a run's data."""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError, DisagreementError
from thinwire.comm.fsdp import is_sharded, local, whole_of, wrapper_inside
from thinwire.comm.wire import Wire
from thinwire.factor.layers import factored_names
from thinwire.factor.optimizers import Optimizers

log = logging.getLogger("thinwire")

_REFUSED = {
    "LBFGS": "its state spans all parameters at once; use SGD or an Adam",
    "SparseAdam": "it takes sparse gradients only; use Adam with dense ones",
}
_TWO_PASSES = ("SAM", "ASAM")
"""They perturb weights, and take them back before the optimizer they wrap steps."""


def check_model(model: nn.Module) -> None:
    """Refuse a model without values, with factored layers, or inside a wrapper."""
    for name, p in model.named_parameters():
        if isinstance(p, UninitializedParameter):
            raise ConfigError(
                f"parameter {name!r} has no shape yet; run one batch through the lazy model before attach()"
            )
        if p.is_meta:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no values; build the model with values"
            )
    if any(factored_names(module) for module in model.modules()):
        raise ConfigError(
            "the model has factored layers from an earlier attach: finish() that replica, "
            "or build a new model and load() a save into it"
        )
    if not is_sharded(model) and (kind := wrapper_inside(model)):
        raise ConfigError(
            f"the model is inside {kind}, which averages or shards its parameters itself; give attach() the bare "
            "model instead"
        )


_INNER = ("optimizer", "_optimizer", "optim", "base_optimizer")
"""Attributes in which wrappers keep the optimizer they wrap."""


def given_optimizers(given: Any) -> Optimizers:
    """The optimizers the user gave, one or a list, without their wrappers."""
    each = list(given) if isinstance(given, list | tuple) else [given]
    if not each:
        raise ConfigError("no optimizer was given; give one, or a list of those that train this model")
    found = [_innermost(one) for one in each]
    if len({id(one) for one in found}) < len(found):
        raise ConfigError("the same optimizer was given twice; give each once")
    return Optimizers(*found, wrappers=[one for one in each if _has_hooks(one) and one not in found])


def _innermost(optimizer: Any) -> Optimizer:
    """The optimizer inside wrappers such as Accelerate's, which only call it."""
    inner = next((found for name in _INNER if isinstance(found := getattr(optimizer, name, None), Optimizer)), None)
    if inner is not None and (not _has_hooks(optimizer) or type(optimizer).__name__ in _TWO_PASSES):
        return _innermost(inner)
    if inner is not None and inner.state is not optimizer.state:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be attached: it keeps state of its own beside that of the "
            f"{type(inner).__name__} it wraps, and saves and changes of shape would reach one of the two; use "
            f"{type(inner).__name__} alone, or SAM around it"
        )
    if not isinstance(optimizer, Optimizer) or not _has_hooks(optimizer):
        raise ConfigError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is not a torch.optim.Optimizer, so its steps "
            "cannot be followed; give the torch optimizer that it wraps, or a list of optimizers"
        )
    return optimizer


def _has_hooks(optimizer: Any) -> bool:
    """Whether its step calls step hooks; a wrapper that never initialised its base class has none."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def check_optimizers(model: nn.Module, optimizers: Optimizers) -> None:
    """Refuse unsupported optimizers, those of another model, and parameters that no optimizer holds."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if kind in _REFUSED:
            raise ConfigError(f"optimizer {kind} cannot be attached: {_REFUSED[kind]}")
        held = Optimizers(optimizer).parameters
        own = {id(p) for p in model.parameters()}
        if not any(id(p) in own for p in held):
            raise ConfigError(
                f"the optimizer ({kind}, {len(held)} parameters) holds none of the model's parameters; "
                "build it from this model's parameters(), after any move to a device"
            )
    _check_each_is_held_once(model, optimizers)


def _check_each_is_held_once(model: nn.Module, optimizers: Optimizers) -> None:
    times = Counter(id(p) for p in optimizers.parameters)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if twice := [name for name, p in trained if times[id(p)] > 1]:
        raise ConfigError(f"parameter {twice[0]!r} is held by two of the optimizers; put it into one of them only")
    if left := [name for name, p in trained if not times[id(p)]]:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ConfigError(
            f"parameter {left[0]!r}{more} would get gradients, but none of the given optimizers holds it; if "
            "another optimizer trains it, give both as attach(model, [first, second], …), else freeze it with "
            "requires_grad_(False) before attach"
        )


def check_same_architecture(model: nn.Module, optimizers: Optimizers, wire: Wire) -> None:
    """Names, shapes, dtypes and optimizer groups must be the same on all workers."""
    own = _architecture(model, optimizers)
    _check_same(own, wire, "models", "build the same model and optimizer on every worker")


def architecture_digest(model: nn.Module, optimizers: Optimizers) -> str:
    """A digest of names, shapes, dtypes and optimizer groups."""
    return _digest(_architecture(model, optimizers))


def check_same_data(description: Sequence[str], wire: Wire) -> None:
    """The description of the data must be the same on all workers; counted in the ledger as part of attach."""
    before, wire.ledger.phase = wire.ledger.phase, "attach"
    _check_same(description, wire, "data", "give every worker the same data")
    wire.ledger.phase = before


def _check_same(own: Sequence[str], wire: Wire, what: str, remedy: str) -> None:
    if len(set(wire.all_gather_object(_digest(own)))) == 1:
        return
    gathered = wire.all_gather_object(list(own))
    differing = [rank for rank, other in enumerate(gathered) if other != gathered[0]]
    here, there = gathered[0], gathered[differing[0]]
    place = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), min(len(here), len(there)))
    raise DisagreementError(
        f"workers have different {what}: rank 0 has {_entry(here, place)} where rank {differing[0]} has "
        f"{_entry(there, place)} (ranks that differ from rank 0: {', '.join(map(str, differing))}); {remedy}"
    )


def broadcast_initial_values(model: nn.Module, wire: Wire) -> None:
    """Broadcast rank 0's parameters and buffers if workers differ, as DDP does."""
    tensors = [*(p.detach() for p in model.parameters()), *model.buffers()]
    if not wire.agree(tensors, "checksums"):
        wire.broadcast(tensors, "first values")
        if wire.topology.rank == 0:
            log.info("workers had different initial values: all use rank 0's")


def broadcast_optimizers(model: nn.Module, optimizers: Optimizers, wire: Wire) -> None:
    """Likewise the state that optimizers have from earlier training: where groups kept their own, it differs."""
    held = [optimizers.state_of(whole_of(p)) for p in model.parameters()]
    tensors = [local(t) for state in held for _, value in sorted(state.items()) for t in _tensors_in(value)]
    if tensors and not wire.agree(tensors, "checksums"):
        for device in {t.device for t in tensors}:
            wire.broadcast([t for t in tensors if t.device == device], "first values")
        if wire.topology.rank == 0:
            log.info("workers had different optimizer state: all use rank 0's")


def _tensors_in(value: Any) -> list[Tensor]:
    """Some optimizers keep matrices in lists."""
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def _architecture(model: nn.Module, optimizers: Optimizers) -> list[str]:
    group_of = {id(p): i for i, (_, group) in enumerate(optimizers.groups) for p in group["params"]}
    lines = [f"optimizer {type(o).__name__} with {len(o.param_groups)} groups" for o in optimizers]
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        frozen = ", frozen" if isinstance(t, nn.Parameter) and not t.requires_grad else ""
        state = optimizers.state_of(t) if isinstance(t, nn.Parameter) else {}
        kept = f", with {', '.join(sorted(map(str, state)))}" if state else ""
        lines.append(f"{name} {list(t.shape)} {t.dtype} in group {group_of.get(id(t), 'none')}{frozen}{kept}")
    return lines


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _entry(lines: list[str], place: int) -> str:
    return repr(lines[place]) if place < len(lines) else "nothing more"
