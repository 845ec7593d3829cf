"""What a replica refuses while it trains, so that workers never disagree without a word."""

import gc
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from thinwire.comm.buckets import all_finite
from thinwire.comm.wrappers import wrapper_around, wrapper_inside
from thinwire.errors import ConfigError, DisagreementError, DivergedError, ThinwireError
from thinwire.methods.base import Method
from thinwire.methods.merging import average_buffers

attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Replicas that follow an optimizer now."""


def refuse_attached(model: nn.Module) -> None:
    """Two replicas must not train the same parameters; one that is gone but for reference cycles does not."""
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
    """Not inline: what the loop's own variables hold is not collected."""
    return next((own[id(p)] for replica in attached for p in replica.parameters() if id(p) in own), None)


def refuse_wrappers(replica: nn.Module, method: Method, *, first: bool) -> None:
    """Nobody else may average the parameters; what takes time to find is looked for before the first step alone."""
    kind = wrapper_around(method.optimizers.parameters)
    if first and kind is None:
        kind = wrapper_inside(replica)
        if kind is None:
            refuse_replaced(method)
    if kind:
        raise ThinwireError(
            f"the replica is inside {kind}, which averages all gradients over the world at every step, past Thinwire "
            "and its ledger: call the replica itself, and keep frameworks from wrapping it (with Accelerate, do not "
            "prepare() the replica; with Lightning, no strategy of its own)"
        )


def refuse_replaced(method: Method) -> None:
    """The model must have the parameters that the optimizers were attached with."""
    held = {id(p) for p in method.optimizers.parameters}
    named = [(name, p) for name, p in method.model.named_parameters() if p.requires_grad]
    new = next((name for name, p in named if id(p) not in held), None)
    if new is not None or not named:
        what = f"parameter {new!r} is new" if new else "it has no parameters left"
        raise ThinwireError(
            f"the model is not as it was attached: {what}; change or shard a model before its optimizer is built and "
            "attached, or detach() first"
        )


def check_parameters(method: Method, call: str, *, everywhere: bool = False, finite: bool = True) -> None:
    """Workers that should hold the same parameters must, bit for bit, and none that are not finite; collective.

    Those are all workers where the method trains together or has just merged (`everywhere`), else the members of each
    group. What was counted is not believed: whatever changed parameters unseen was not counted either.
    """
    named = list(method.model.named_parameters())
    bad = next((i + 1 for i, (_, p) in enumerate(named) if finite and not all_finite([p])), 0)
    rows = method.wire.all_gather_scalars([bad, *method.wire.checksum([p for _, p in named])], "checksums")
    if worst := [(rank, int(row[0]) - 1) for rank, row in enumerate(rows) if row[0]]:
        rank, index = worst[0]
        raise DivergedError(
            f"{call}: parameter {named[index][0]!r} of rank {rank} is not finite after step {method.step}; go back to "
            "a checkpoint and lower the learning rate"
        )
    topology = method.topology
    parts = [topology.world] if everywhere or method.in_sync else topology.groups
    _refuse_different(method, call, [rank for part in parts for rank in part if rows[rank] != rows[part[0]]])


def agree_on_buffers(method: Method) -> None:
    """One set of buffers on all workers: each may have run batches of its own since the last step; collective."""
    buffers = list(method.model.buffers())
    rows = method.wire.all_gather_scalars(method.wire.checksum(buffers), "checksums") if buffers else []
    if any(row != rows[0] for row in rows):
        average_buffers(method.wire, buffers, len(method.topology.group) / method.topology.world_size)


def _refuse_different(method: Method, call: str, odd: Sequence[int]) -> None:
    if not odd:
        return
    ranks = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    seen = "" if method.step else "; no step of the attached optimizer was seen"
    raise DisagreementError(
        f"{call}: workers hold different parameters after step {method.step}, {ranks} not those of the first{seen}. "
        "Something else than the attached optimizer changed them on some workers, or learning rates or gradients were "
        "not the same everywhere (a loss that does not come from the replica's pass, two backward passes of one), "
        "or workers run different versions or hardware; go back to a checkpoint"
    )


def sign_as(forward: Any, model: nn.Module) -> None:
    """Give a replica's forward pass the signature of its model's: Hugging Face's Trainer chooses columns by it."""
    try:
        forward.__signature__ = inspect.signature(model.forward)
    except (TypeError, ValueError):  # some are built in, and have none
        return
