"""Going on when a group is lost.

What groups do together is a transaction. All do their part, then all vote, and only whoever has seen the vote of all
others takes it for done. A vote that was seen to be complete by one worker proves that every worker has done its part.
So when a group is lost, the others report how far they are to the next generation, and each knows what to do:

    someone has seen the vote          it is done, on all workers that are left
    nobody has                         it has not happened: all take back their part and try again without the group

In phases that average gradients the vote comes before an optimizer changes anything. A step that fails is skipped by
all, so nothing has to be copied. Before groups average parameters each worker keeps a copy of what that changes.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.losses import tried
from thinwire.comm.membership import LostError, Membership
from thinwire.comm.topology import Topology
from thinwire.config import LocalSGD
from thinwire.config.faults import Faults
from thinwire.errors import ConfigError
from thinwire.methods.base import Method
from thinwire.methods.context import Saved
from thinwire.methods.merging import restored

log = logging.getLogger("thinwire")


def met(config: Any, faults: Faults) -> Membership:
    """The groups that launchers started, all of them here; collective."""
    if config.group_size is not None:
        raise ConfigError(
            f"`group_size`={config.group_size} with faults=…: there each launcher's workers are a group; leave "
            "`group_size` out"
        )
    if not isinstance(config, LocalSGD):
        raise ConfigError(
            f"faults=… is for LocalSGD and DiLoCo so far, not for {type(config).__name__}; leave it out, and resume "
            "from a checkpoint"
        )
    if config.overlap:
        raise ConfigError(f"`overlap`={config.overlap} with faults=… is not supported so far; leave one of them out")
    membership = Membership.from_environment(faults)
    membership.begin()
    with membership.connections.noted():
        membership.open_world()
    return membership


class Recovery:
    """Makes what groups do together happen on all of them or on none."""

    def __init__(self, method: Method, membership: Membership) -> None:
        self.method, self.membership = method, membership
        self.votes = 0
        """Votes that this worker has seen complete."""
        self.on_regroup: list[Callable[[], None]] = []
        """Called when other groups are to come, while those before are still known."""

    # In a step.

    def before_update(self) -> bool:
        """Whether the step may be taken; collective where gradients were exchanged."""
        gradients = self.method.gradients
        if gradients.code is None or len(self.method.topology.groups) == 1:
            return True
        lost, ready = gradients.lost, gradients.lost is None
        if ready:
            lost = self._vote()
        if lost is None:
            return True
        done = self._regroup(lost, ready=ready)
        if not done:
            gradients.throw_away()
            log.warning("nobody takes the step after step %d: its gradients were lost", self.method.step)
        return done

    def end_step(self) -> None:
        """End a step; where groups average, all of them or none."""
        method = self.method
        if self.membership.is_called and method.gradients.code is None:
            self._regroup(None, ready=False)  # others have lost a group and wait
        if method.next_event > method.step + 1:
            self._until_done(method.end_step, again=method.settle)
        else:
            self.together(method.end_step)

    def together(self, work: Callable[[], None], *, changes: bool = True) -> None:
        """Work that all groups do together, on all of them or on none; if it `changes` nothing, there is no copy."""
        while True:
            before = Undo(self.method) if changes else None
            lost = tried(work)
            ready = lost is None
            lost = lost or self._vote()
            if lost is None or self._regroup(lost, ready=ready, undo=before):
                return

    def show_merged(self, merge_into: Callable[[ExitStack], None], stack: ExitStack) -> None:
        """Let the model be the merged one until the stack is closed.

        That may not end with other groups than it began with, so the merged values are copied.
        """
        model = self.method.model
        merged: list[Tensor] = []

        def look() -> None:
            with ExitStack() as short:
                merge_into(short)
                merged[:] = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]

        self.together(look, changes=False)
        stack.enter_context(restored(model))
        with torch.no_grad():
            for t, value in zip((*model.parameters(), *model.buffers()), merged, strict=True):
                t.copy_(value)

    def _until_done(self, work: Callable[[], None], again: Callable[[], None]) -> None:
        """Work that may be repeated."""
        if lost := tried(work):
            self._regroup(lost, ready=False)
            self._until_done(again, again)

    def _vote(self) -> str | None:
        """Wait until every worker has done its part; why that is not known, if it is not."""
        lost = tried(lambda: self.method.wire.all_reduce_max(torch.zeros(1), "control"))
        self.votes += lost is None
        return lost

    # Other groups.

    def _regroup(self, why: str | None, *, ready: bool, undo: "Undo | None" = None) -> bool:
        """Go on with the groups that are left; whether what was under way is done."""
        method, before = self.method, dict(self.membership.groups)
        for callback in self.on_regroup:
            callback()
        applied = method.state_dict() if ready or undo is None else {}
        self.membership.leave_world()
        for attempt in range(len(before) + 1):
            reports = self.membership.renew({"votes": self.votes, "ready": ready, "step": method.step})
            done = ready and any(report["votes"] > self.votes for report in reports.values())
            if (again := tried(self._open)) is None:
                break
            if attempt == len(before):
                raise LostError(f"groups that are left cannot reach one another ({again}); resume from a checkpoint")
            self.membership.leave_world()
        if done:
            self.votes += 1
        undone = undo if undo is not None and not done else None
        state = applied if undone is None else undone.state
        values = undone.restore_values if undone is not None else lambda: None
        method.load_state_dict(Saved(state["shared"], [state["local"]], 0, values, stays=True))
        method.forwards = method.step  # a step that was skipped has run a batch
        self._tell(before, why)
        return done

    def _open(self) -> None:
        layout = self.membership.layout
        with self.membership.connections.noted():
            self.membership.open_world()
            self.method.wire.lay_out(Topology(torch.distributed.get_rank(), layout, layout))

    def _tell(self, before: dict[int, int], why: str | None) -> None:
        lost = sorted(before.keys() - self.membership.groups.keys())
        came = sorted(self.membership.groups.keys() - before.keys())
        event = {"step": self.method.step, "event": "groups", "lost": lost, "came": came}
        self.method.events.append(event | {"groups": len(self.membership.groups)})
        if not self.method.topology.rank and lost:
            who = f"group{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            left, step = len(self.membership.groups), self.method.step
            log.warning(
                "%s lost after step %d, %d of %d go on (%s)", who, step, left, len(before), why or "as others say"
            )


class Undo:
    """A copy of what an average may change: model, optimizers and method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state = _copied(method.state_dict())
        self.values = [(t, t.detach().clone()) for t in (*method.model.parameters(), *method.model.buffers())]
        self.moments = [
            (optimizer, p, _copied(dict(optimizer.state.get(p, {}))))
            for optimizer in method.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def restore_values(self) -> None:
        """Put parameters, buffers and optimizer state back."""
        for t, value in self.values:
            t.copy_(value)
        for optimizer, p, state in self.moments:
            if state:
                optimizer.state[p] = state
            else:
                optimizer.state.pop(p, None)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree
