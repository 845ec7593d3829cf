"""`attach`, the one line a user changes."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError
from thinwire.comm import backends
from thinwire.comm.collectives import ProcessGroupWire
from thinwire.comm.fsdp import ShardedModel, is_sharded, refuse_on_shards
from thinwire.comm.ledger import Ledger, watched
from thinwire.comm.sharded import ShardedWire, group_size_of
from thinwire.comm.times import Clock
from thinwire.comm.topology import backend, join, place
from thinwire.comm.wire import Wire
from thinwire.config.faults import Faults
from thinwire.elastic.membership import Membership
from thinwire.elastic.notices import Notices
from thinwire.elastic.recovery import Recovery
from thinwire.elastic.stopping import handle_signals, release_signals
from thinwire.elastic.store import meeting
from thinwire.exchange.parts import Feature, MethodContext
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.registry import make, name_of, refuse
from thinwire.replica.guards import refuse_attached, refuse_switching
from thinwire.replica.notices import ensure_logging, log_attached
from thinwire.replica.preflight import (
    architecture_digest,
    broadcast_initial_values,
    broadcast_optimizers,
    check_model,
    check_optimizers,
    check_same_architecture,
    given_optimizers,
)
from thinwire.replica.replica import Replica

log = logging.getLogger("thinwire")


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    config: Any,
    *,
    scaler: Any = None,
    compile: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    faults: Faults | None = None,
    slow_backend: str | None = None,
) -> Replica:
    """Train `model` by the method whose config this is; collective.

    Call the returned replica instead of the model and keep the loop as it is. Several optimizers, such as Muon for
    matrices and AdamW for the rest, are given as a list: a step is over when each has stepped. Give the `GradScaler` as
    `scaler` if there is one, arguments of `torch.compile` as `compile`, further ones of
    `DistributedDataParallel` (`bucket_cap_mb`, `find_unused_parameters`, …) as `ddp`. With `faults` the run goes on
    without groups that die; each group then has a launcher of its own. `slow_backend`, "gloo" or "nccl", carries what
    GPUs send between machines; None is nccl where each worker has a GPU.
    """
    ensure_logging()
    name_of(config)
    refuse_attached(model)
    check_model(model)
    optimizers = given_optimizers(optimizer)
    check_optimizers(model, optimizers)
    given = {"scaler": scaler, "compile": compile, "ddp": ddp}
    wire, membership = _opened(model, optimizers, config, faults, slow_backend, given)
    seen = ShardedModel(model) if isinstance(wire, ShardedWire) else model
    if isinstance(seen, ShardedModel) and isinstance(wire, ShardedWire):
        wire.find_share = lambda: seen.share
    if membership is None or not membership.joins:
        check_same_architecture(model, optimizers, wire)
        broadcast_initial_values(seen, wire)
        broadcast_optimizers(seen, optimizers, wire)
    context = MethodContext(seen, optimizers, wire, ddp=dict(ddp or {}), has_scaler=scaler is not None)
    if isinstance(seen, ShardedModel):
        context.on_release.append(seen.fresh.remove)
    method = make(config, context)
    refuse_switching(method)
    recovery = Recovery(method, membership) if membership is not None else None
    replica = Replica(method, scaler=scaler, compile=compile, recovery=recovery)
    if faults is not None and faults.on_term == "leave":
        handle_signals(replica)
        release_signals(membership)
    log_attached(replica._method, replica._trained)
    return replica


def _opened(
    model: nn.Module,
    optimizers: Optimizers,
    config: Any,
    faults: Faults | None,
    slow_backend: str | None,
    given: dict[str, Any],
) -> tuple[Wire, Membership | None]:
    """The wire of the running job, and who is in it where groups may be lost; collective.

    What cannot be had together is refused before anybody is waited for.
    """
    device = next(model.parameters()).device
    ledger = Ledger(Clock(device), watched())
    if faults is None:
        join()
        chosen = backends.choose(slow_backend, device)
        settings = f"{config!r} with slow_backend={chosen.between!r}" if chosen.between else repr(config)
        if not is_sharded(model):
            return ProcessGroupWire.open(config.group_size, settings, device, ledger, backends=chosen), None
        refuse(config, Feature.SHARDS)
        if refuse_on_shards(optimizers, ddp=given["ddp"]):
            refuse(config, Feature.COLUMNS)
        size = _size_of_groups(model, config)
        return ShardedWire.open(size, settings, device, ledger, backends=chosen), None
    if is_sharded(model):
        raise ConfigError(
            "faults=… is not for sharded models, whose mesh would end with the groups that are there now: leave it "
            "out, and resume from a checkpoint"
        )
    if given["scaler"] is not None:
        raise ConfigError(
            "a GradScaler with faults=… is not supported: groups agree on its scale where none of them can be lost; "
            "train in bf16, which needs no scaler"
        )
    if slow_backend == "nccl":
        raise ConfigError(
            "`slow_backend`='nccl' with faults=…: gloo carries all of that, since it notices who is lost; leave it out"
        )
    about = {"config": repr(config), "model": architecture_digest(model, optimizers)}
    return _met(config, faults, about, device, ledger)


def _size_of_groups(model: nn.Module, config: Any) -> int:
    size = group_size_of(model)
    if config.group_size not in (None, size):
        raise ConfigError(
            f"`group_size`={config.group_size}, and the model is sharded over {size} workers, which are a group: leave "
            "`group_size` out"
        )
    return size


def _met(
    config: Any, faults: Faults, about: dict[str, str], device: torch.device, ledger: Ledger
) -> tuple[Wire, Membership]:
    """The groups that launchers started, all of them here, or those of a run that is under way; collective."""
    if config.group_size is not None:
        raise ConfigError(
            f"`group_size`={config.group_size} with faults=…: there each launcher's workers are a group; leave "
            "`group_size` out"
        )
    refuse(config, Feature.FAULTS)
    backends.take_interface()
    membership = Membership(meeting(faults.timeout), faults, about)
    if faults.on_term == "leave":
        handle_signals(membership)
    wires: list[Wire] = []
    here = place()
    chosen = backends.where_groups_may_be_lost(backend(here) if here else "gloo", device)

    def open_wire() -> None:
        with membership.opened_world():
            watch, layout = membership.heartbeat, membership.layout
            if membership.joins:
                wires.append(ProcessGroupWire(membership.topology, ledger, watch, chosen))
            else:
                wires.append(ProcessGroupWire.open(None, repr(config), device, ledger, layout, watch, chosen))

    membership.begin(open_wire)
    if faults.notices is not None and (here is None or here.local_rank == 0):
        membership.heartbeat.on_close.append(Notices(faults.notices).close)
    return wires[-1], membership
