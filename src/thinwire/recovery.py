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

import torch
from torch import Tensor

from thinwire.comm.losses import tried
from thinwire.comm.membership import LostError, Membership
from thinwire.joining import hand_over, take_over
from thinwire.methods.base import Method
from thinwire.methods.context import Saved
from thinwire.methods.merging import restored
from thinwire.undo import Undo

log = logging.getLogger("thinwire")


class Recovery:
    """Makes what groups do together happen on all of them or on none."""

    def __init__(self, method: Method, membership: Membership) -> None:
        self.method, self.membership = method, membership
        self.votes = 0
        """Votes that this worker has seen complete."""
        self._lets_in = False  # as of the last vote, a group waits to be let in
        self.on_regroup: list[Callable[[], None]] = []
        """Called when other groups are to come, while those before are still known."""

    def take_over(self) -> None:
        """In a group that joins, in place of the method's `attach`."""

        def take() -> None:
            self.votes = take_over(self.method, self.membership)

        def open_and_take() -> None:
            self._open()
            take()

        if lost := tried(take):
            log.warning("whoever handed over was lost (%s), so this group asks again", lost)
            self.membership.leave_world()
            self.membership.join_and(open_and_take)

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
            self._until_done(self._agree_on_buffers, self._agree_on_buffers)
            if not self.method.topology.rank:
                log.warning("nobody takes the step after step %d: its gradients were lost", self.method.step)
        return done

    def _agree_on_buffers(self) -> None:
        """The forward pass of a step that was skipped has changed running statistics."""
        gradients = self.method.gradients
        gradients.replicated.broadcast_buffers(gradients.members)

    def end_step(self) -> None:
        """End a step; where groups average, all of them or none."""
        method = self.method
        if self.membership.heartbeat.is_called and method.gradients.code is None:
            self._regroup(None, ready=False)  # others have lost a group and wait
        method.gradients.commit()  # the step is taken, whatever comes of its end
        if self._trains_apart and self.membership.faults.skip_after is not None:
            self._leave_out_if_late()
        if method.meets_next:
            self.together(self._count_and_end)
        else:
            self._until_done(self._count_and_end, again=method.settle)
        if len(method.topology.groups) == 1:  # with nobody to average with there was no vote
            self._vote()
        if self._lets_in:  # here all are at the same place of their scripts, which is where whoever joins begins
            self._regroup(None, ready=False, admits=True)

    @property
    def _trains_apart(self) -> bool:
        return self.method.gradients.code is None and len(self.method.topology.groups) > 1

    def _leave_out_if_late(self) -> None:
        """Go to the average that others wait at, without the steps before it; all of a group do."""
        method, due = self.method, self.method.next_event
        if due <= method.step + 1:
            self.membership.arrive(method.step + 1)
            return
        late = torch.tensor([float(self.membership.heartbeat.holds_up(due))])
        if lost := tried(lambda: method.wire.sum_in_group(late, "control")):
            self._regroup(lost, ready=False)
        elif late:
            method.waits.skipped += due - 1 - method.step
            method.step = due - 1

    def _count_and_end(self) -> None:
        """Steps that were skipped, or that others took before this group came, have left no trace in its counters."""
        self.method.forwards = self.method.step + 1
        self.method.end_step()

    def together(self, work: Callable[[], None], *, changes: bool = True, last: bool = False) -> None:
        """Work that all groups do together, on all of them or on none.

        If it `changes` nothing, there is no copy. Who has seen the `last` one leaves, and says so.
        """
        copies: list[Undo] = []
        while True:
            copies.clear()
            lost = tried(lambda: copies.append(Undo(self.method))) if changes else None  # it waits for what is pending
            lost = lost or tried(work)
            ready, before = lost is None, copies[0] if copies else None
            lost = lost or self._vote()
            if lost is not None and ready and last and self.membership.was_seen(self.votes + 1):
                return
            if lost is None or self._regroup(lost, ready=ready, undo=before):
                if last:
                    self.membership.testify(self.votes)
                    self.membership.heartbeat.close()
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
        found = []

        def vote() -> None:
            wanted = float(self.membership.heartbeat.wanted > self.membership.generation)
            found.append(self.method.wire.all_reduce_max(torch.tensor([wanted]), "control"))

        lost = tried(vote)
        if lost is None:
            self.votes += 1
            self._lets_in = bool(found[0])
        return lost

    # Other groups.

    def _regroup(self, why: str | None, *, ready: bool, undo: Undo | None = None, admits: bool = False) -> bool:
        """Go on with the groups that are left, and those that want in if all of them admit that.

        Whether what was under way is done.
        """
        method, before = self.method, dict(self.membership.groups)
        for callback in self.on_regroup:
            callback()
        method.abandon_pending()
        applied = method.state_dict() if ready or undo is None else {}
        self.membership.leave_world()
        for attempt in range(len(before) + 1):
            reports = self.membership.renew({"votes": self.votes, "admits": admits})
            done = ready and any(report.get("votes", 0) > self.votes for report in reports.values())
            if (again := tried(self._open)) is None:
                break
            if attempt == len(before):
                raise LostError(f"groups that are left cannot reach one another ({again}); resume from a checkpoint")
            self.membership.leave_world()
        if done:
            self.votes += 1
        state = applied
        if undo is not None and not done:
            undo.restore()
            state = undo.state
        method.load_state_dict(Saved(state["shared"], [state["local"]], 0, lambda: None, stays=True))
        method.abandon_pending()
        method.forwards = method.step
        self._lets_in = False
        self._tell(before, why)
        if self.membership.joined and (again := tried(lambda: hand_over(method, self.membership, self.votes))):
            self._regroup(again, ready=False)
        return done

    def _open(self) -> None:
        with self.membership.opened_world():
            self.method.wire.lay_out(self.membership.topology)

    def _tell(self, before: dict[int, int], why: str | None) -> None:
        now, came = self.membership.groups, self.membership.joined
        lost = sorted((before.keys() - now.keys()) | (before.keys() & came))
        event = {"step": self.method.step, "event": "groups", "lost": lost, "came": sorted(came), "groups": len(now)}
        self.method.events.append(event)
        if not self.method.topology.rank:
            for who, what in ((lost, "lost"), (sorted(came), "joined")):
                if who:
                    names = f"group{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
                    reason = f" ({why})" if why and what == "lost" else ""
                    log.warning("%s %s after step %d, %d go on%s", names, what, self.method.step, len(now), reason)
