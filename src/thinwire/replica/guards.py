"""Checks while a replica trains, so that workers never diverge silently."""

import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from thinwire.base.errors import ConfigError, DisagreementError, DivergedError, ThinwireError
from thinwire.comm.buckets import all_finite
from thinwire.comm.fsdp import local, whole_of, wrapper_around, wrapper_inside
from thinwire.exchange.merging import average_buffers
from thinwire.methods.runner import Runner

log = logging.getLogger("thinwire")

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Replicas whose hooks are on an optimizer now."""


def refuse_attached(model: nn.Module) -> None:
    """Two replicas must not train the same parameters; unreachable replicas are collected first."""
    if model in attached:
        raise ConfigError("the model is a replica already; detach() or finish() it, and attach replica.module")
    own = {id(p): name for name, p in model.named_parameters()}
    for last in (False, True):
        name = _name_of_shared(own)
        if name is None:
            return
        if last:
            raise ConfigError(
                f"the model is attached already, another replica trains its parameter {name!r}; finish() or detach() "
                "that one first"
            )
        gc.collect()


def _name_of_shared(own: dict[int, str]) -> str | None:
    """A function of its own, since the caller's loop variables would keep a replica alive."""
    return next((own[id(p)] for replica in attached for p in replica.parameters() if id(p) in own), None)


def refuse_wrappers(replica: nn.Module, method: Runner, *, first: bool) -> None:
    """Refuse wrappers that average parameters themselves; slow checks run before the first step only."""
    kind = wrapper_around(method.optimizers.parameters)
    if first and kind is None:
        kind = wrapper_inside(replica) if not method.wire.is_sharded else None
        if kind is None:
            refuse_replaced(method)
    if kind:
        raise ThinwireError(
            f"the replica is inside {kind}, which averages all gradients over the world at every step, bypassing "
            "Thinwire and its ledger: call the replica itself, and keep frameworks from wrapping it (with Accelerate, "
            "do not prepare() the replica; with Lightning, use no strategy)"
        )


def refuse_replaced(method: Runner) -> None:
    """Refuse a model whose parameters were replaced after attach()."""
    held = {id(p) for p in method.optimizers.parameters}
    named = [(name, whole_of(p)) for name, p in method.model.named_parameters() if p.requires_grad]
    new = next((name for name, p in named if id(p) not in held), None)
    if new is not None or not named:
        what = f"parameter {new!r} is new" if new else "it has no parameters left"
        raise ThinwireError(
            f"the model has changed since attach(): {what}; change or shard a model before its optimizer is built and "
            "attached, or detach() first"
        )


class KeptParameters:
    """Warns of parameters that a script took from the model before they were replaced, and still uses.

    A list that was made for `clip_grad_norm_` misses the factors from then on, and clips nothing of them. One that is
    only kept, such as the list that an optimizer was made from, harms nobody.
    """

    def __init__(self, method: Runner) -> None:
        self.method = method
        self._was_said = False

    def end_step(self) -> None:
        """A step is over; what was replaced in it says so when it is used again."""
        replaced = self.method.optimizers.replaced
        for p in [p for ref in replaced if (p := ref()) is not None and type(p) is nn.Parameter]:
            p.__class__ = _Replaced
            p.__dict__["say"] = weakref.WeakMethod(self._say)
        replaced.clear()

    def _say(self) -> None:
        if self._was_said or self.method.topology.rank:
            return
        self._was_said = True
        log.warning(
            "weights were replaced by factors by step %d, but the script still uses a parameter that it took from the "
            "model before, which nobody trains any more: what is done with it, such as clip_grad_norm_(kept, …), does "
            "nothing to the factors. Ask for parameters each time: clip_grad_norm_(model.parameters(), …)",
            self.method.step,
        )


_SIZES = {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf")}
_HARMLESS = _SIZES | {Tensor.numel, Tensor.nelement, Tensor.size, Tensor.dim, Tensor.__hash__}
"""No warning for a script that counts parameters: it trains what it should."""


class _Replaced(nn.Parameter):
    """A parameter that the model has no more; asking for its gradient or value is reported."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            parts = [part for each in args for part in (each if isinstance(each, list | tuple) else [each])]
            for p in [part for part in parts if type(part) is _Replaced]:
                if (say := p.__dict__.get("say", lambda: None)()) is not None:
                    say()
        return super().__torch_function__(func, types, args, kwargs or {})


def check_parameters(method: Runner, call: str, *, everywhere: bool = False, finite: bool = True) -> None:
    """Workers must hold bit-identical, finite parameters where they should be in sync; collective.

    In sync are all workers while the method trains together or has just merged (`everywhere`), else the members of each
    group. Checksums are compared, since counters miss changes made behind our back.
    """
    named = list(method.model.named_parameters())
    bad = next((i + 1 for i, (_, p) in enumerate(named) if finite and not all_finite([p])), 0)
    rows = method.wire.all_gather_scalars([bad, *method.wire.checksum([p for _, p in named])], "checksums")
    worst = [(rank, int(row[0]) - 1) for rank, row in enumerate(rows) if row[0]]
    if worst and not _can_go_on(method, {rank for rank, _ in worst}):
        rank, index = worst[0]
        raise DivergedError(
            f"{call}: parameter {named[index][0]!r} of rank {rank} is not finite after step {method.step}; resume "
            "from a checkpoint with a lower learning rate"
        )
    topology = method.topology
    parts = [topology.world] if everywhere or method.in_sync else topology.groups
    _refuse_different(method, call, [rank for part in parts for rank in part if rows[rank] != rows[part[0]]])


def agree_on_loads(method: Runner, *, changed: bool) -> bool:
    """Whether any worker has `changed` its model by loading a state; then all must hold the same now; collective.

    Optimizers need the same state only where all workers train together.
    """
    states: list[Tensor] = []
    if method.in_sync and not method.wire.is_sharded:
        found = (state for o in method.optimizers for state in o.state.values())
        states = [value for state in found for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    own = [changed, *method.wire.checksum(list(method.model.parameters())), *method.wire.checksum(states)]
    rows = method.wire.all_gather_scalars(own, "checksums")
    any_changed = any(row[0] for row in rows)
    held = [row[1 if any_changed else 3 :] for row in rows]
    if odd := [rank for rank, row in enumerate(held) if row != held[0]]:
        raise DisagreementError(
            f"load_state_dict(): after it {_named(odd)} other values than rank 0, after step {method.step}; load the "
            "same state of the model and of its optimizers on all workers, all of it while groups train apart; or go "
            "back to a save by replica.load(folder)"
        )
    return any_changed


def _named(odd: Sequence[int]) -> str:
    return f"rank {odd[0]} holds" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} hold"


def _can_go_on(method: Runner, bad: set[int]) -> bool:
    """Whether groups that diverged are left out of the next average, and there are others."""
    leaves_out = method.leaves_out_diverged and not method.in_sync
    return leaves_out and any(not bad.intersection(group) for group in method.topology.groups)


def refuse_switching(method: Runner) -> None:
    """An optimizer that evaluates other weights than it trains needs a method that leaves both alone."""
    if method.optimizers.switching and not method.only_gradients:
        kind, config = type(method.optimizers.switching[0]).__name__, type(method.config).__name__
        raise ConfigError(
            f"optimizer {kind} cannot be attached with {config}: it evaluates other weights than it trains, and "
            f"{config} would average or factor only the latter; use AllReduce, PowerSGD, TopK or OneBit, or AdamW"
        )


def refuse_evaluating(method: Runner) -> None:
    """Nothing is trained on weights that an optimizer shows for evaluation."""
    for optimizer in method.optimizers.evaluating:
        raise ThinwireError(
            f"{type(optimizer).__name__} holds the weights that are evaluated, not those it trains; call "
            "optimizer.train() on all workers before the next training batch"
        )


def refuse_state(method: Runner) -> None:
    """Refuse optimizer state that cannot be saved, or has no mean where groups average it; after the first step."""
    averages = method.averages_moments and len(method.topology.groups) > 1
    for optimizer in method.optimizers:
        kind = type(optimizer).__name__
        for name, value in ((n, v) for state in optimizer.state.values() for n, v in state.items()):
            if (odd := _unsaved(value)) is not None:
                raise ConfigError(
                    f"optimizer {kind} cannot be attached: it keeps {name!r} as {odd}, which no save can hold; use one "
                    "whose state is plain tensors, such as AdamW, Lamb or SOAP"
                )
            if averages and not _has_mean(value):
                raise ConfigError(
                    f"`moments`={method.config.moments!r} cannot be used with {kind}: the mean of its {name!r} over "
                    "groups means nothing; leave `moments` out, or use AdamW"
                )


def refuse_masters(method: Runner) -> None:
    """Refuse copies of parameters in an optimizer's state where weights become factors; after each step."""
    method.masters.look()
    if (outside := method.masters.outside) is not None and not method.only_gradients:
        raise ConfigError(
            f"optimizer {type(outside).__name__} cannot be attached with {type(method.config).__name__}: it trains "
            "copies of the parameters that it does not keep in its state, and would undo every average; keep "
            "them in `self.state[p]`, or use a method that averages gradients, such as AllReduce"
        )
    for name in sorted(method.masters.trained) if method.shape.layers else ():
        kind = next(type(o).__name__ for o in method.optimizers if any(name in state for state in o.state.values()))
        raise ConfigError(
            f"optimizer {kind} cannot be attached with {type(method.config).__name__}: it trains copies of the "
            f"parameters that it keeps as {name!r} in its state, and factors have none; use one that trains the "
            "parameters themselves, such as AdamW, or a method that leaves weights whole: LocalSGD, DiLoCo, DASO, "
            "AllReduce"
        )


def _unsaved(value: Any) -> str | None:
    """The type of whatever is not a plain tensor or value, or lists and dicts of them; None if all is."""
    if isinstance(value, list | tuple):
        return next((odd for part in value if (odd := _unsaved(part))), None)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return _unsaved(list(value.values()))
    part = local(value) if isinstance(value, Tensor) else value
    is_plain = value is None or isinstance(value, bool | int | float | str) or type(part) in (Tensor, nn.Parameter)
    return None if is_plain else type(value).__name__


def _has_mean(value: Any) -> bool:
    """Whether state can be averaged element by element: eigenbases in lists, and codes of 8 bits, cannot."""
    if isinstance(value, Tensor):
        return value.dim() == 0 or value.is_floating_point() or value.is_complex()
    return not isinstance(value, list | tuple | dict)


def agree_on_buffers(method: Runner) -> None:
    """Average buffers that differ: workers may have run different batches since the last step; collective."""
    buffers = list(method.model.buffers())
    rows = method.wire.all_gather_scalars(method.wire.checksum(buffers), "checksums") if buffers else []
    if any(row != rows[0] for row in rows):
        average_buffers(method.wire, buffers, len(method.topology.group) / method.topology.world_size)


def _refuse_different(method: Runner, call: str, odd: Sequence[int]) -> None:
    if not odd:
        return
    ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    seen = "" if method.step else "; no step of the attached optimizer was seen"
    raise DisagreementError(
        f"{call}: workers hold different parameters after step {method.step}, {ranks} not those of the first{seen}. "
        "Something other than the attached optimizer changed them on some workers, or learning rates or gradients "
        "differed (a loss that does not come from the replica's forward pass, two backward passes through one forward "
        "pass), or workers run different versions or hardware; resume from a checkpoint"
    )


def sign_as(forward: Any, model: nn.Module) -> None:
    """Copy the model's forward signature: Hugging Face's Trainer selects dataset columns by it."""
    try:
        forward.__signature__ = inspect.signature(model.forward)
    except (TypeError, ValueError):  # built-in functions may have none
        return


@functools.cache
def guard_averages() -> None:
    """Let torch's moving averages say what to use instead where their model has another shape.

    For the class: a model does not know what was copied from it, and a search among all objects takes as long as many
    steps.
    """
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    def checked(self: AveragedModel, model: nn.Module) -> None:
        is_torchs = type(self).update_parameters is checked  # not a subclass that follows, such as thinwire.EMA
        if is_torchs and [p.shape for p in self.module.parameters()] != [p.shape for p in model.parameters()]:
            raise ThinwireError(
                "torch's AveragedModel cannot follow a model whose layers have been factored: use thinwire.EMA(replica,"
                " decay), made after attach(), which averages full weights and goes on through every change of shape"
            )
        update(self, model)

    AveragedModel.update_parameters = checked  # type: ignore[method-assign]
