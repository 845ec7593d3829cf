"""Going on when a group is lost.

What groups do together is a transaction. All do their part, then all vote, and only whoever has seen the vote of all
others takes it for done. A vote that was seen to be complete by one worker proves that every worker has done its part.
So when a group is lost, the others report how far they are to the next generation, and each knows what to do:

    someone has seen the vote          it is done, on all workers that are left
    nobody has                         it has not happened: all take back their part and try again without the group

Votes and reports carry the call and the step. Groups in different calls could try for ever: they are refused by name.
If a collective fails again and again and no group is lost, its error is raised.

In phases that average gradients the vote comes before an optimizer changes anything. A step that fails is skipped by
all, so nothing has to be copied. Before groups average parameters each worker keeps a copy of what that changes.
"""

import logging
import zlib
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from thinwire.base.errors import CollectiveError, DisagreementError, GivenUpError, LostError, OtherRankError
from thinwire.checkpoint.dealing import Came
from thinwire.checkpoint.state import RunState, Undo
from thinwire.comm.wire import attempt
from thinwire.elastic.membership import Groups, Membership, Report, Reports
from thinwire.elastic.stopping import ElasticStop, Left
from thinwire.exchange.merging import restored
from thinwire.exchange.parts import Saved
from thinwire.methods.runner import Runner

log = logging.getLogger("thinwire")

_STEP = "a step"
_TRIES = 3
"""So often in a row a call may fail although no group is lost, and a group may be given up before it takes part."""


class Recovery:
    """Makes what groups do together happen on all of them or on none."""

    def __init__(self, method: Runner, membership: Membership) -> None:
        self.method, self.membership = method, membership
        self.state = RunState(method)
        self.stop = ElasticStop(membership)
        self.votes = 0
        """Votes that this worker has seen complete."""
        self._lets_in = False  # as of the last vote, a group waits to be let in
        self._in_vain = self._rejoins = 0
        self._given_up: GivenUpError | None = None
        self.by_steps = False
        """Whether the script loops over `steps()`: groups then join before a step, else after one."""
        self.on_regroup: list[Callable[[], None]] = []
        """Called when other groups are to come, while those before are still known."""
        self.on_lost: list[Callable[[], None]] = []
        """Called when a worker is lost, before anything is done with those that are left."""
        self.on_rejoin: list[Callable[[], None]] = []
        """Called in a group that was given up, before it joins again."""
        self.on_admit: list[Callable[[], None]] = []
        """Called before groups are let in, which know nothing of what is under way."""
        self.joined_late = membership.joins
        """Whether this group came, or came back, to a run that was under way."""
        membership.heartbeat.step = lambda: method.step

    def take_over(self) -> None:
        """In a group that joins, in place of the method's `attach`."""
        if (lost := attempt(self._take)) is not None:
            log.warning("whoever handed over was lost (%s), so this group asks again", lost)
            self.membership.leave_world()
            self.membership.join_and(self._open_and_take)

    def _take(self) -> None:
        """Be what a group in the run is."""
        packed = self.method.wire.broadcast_bytes(None, self.membership.donor_and_new, "join")
        assert packed is not None, "this worker is not among those that take"
        self._count_votes(self.state.take(packed)["votes"])
        self.stop.learn(self.method.step)  # now: others may be about to stop here

    def _open_and_take(self) -> None:
        self._open()
        self._take()

    def rejoin(self) -> None:
        """Join again if this group was given up: it was frozen, cut off or too slow, and is here."""
        error, self._given_up = self._given_up, None
        if error is None:
            return
        method, group, step = self.method, self.membership.slot.group, self.method.step
        self._rejoins += 1
        if self._rejoins > _TRIES:
            raise LostError(f"{error}; that was the {self._rejoins}th time in a row") from None
        _call_all([*self.on_regroup, *self.on_rejoin])
        method.abandon_pending()
        self.membership.leave_world()
        self.membership.join_and(self._open_and_take)
        method.gradients.throw_away()
        self._lets_in, self.joined_late = False, True
        log.warning("group %d is back, at step %d instead of %d", group, method.step, step)

    def _note_given_up(self, error: GivenUpError) -> None:
        """Go on with the script up to the next step, where this group can join again, if groups may."""
        if not self.membership.faults.joins:
            raise error
        log.warning("after step %d: %s; it does so by itself", self.method.step, error)
        error.__traceback__ = error.__context__ = None
        self._given_up = error

    def before_step(self) -> None:
        """In a loop over `steps()`: here a group that was given up joins again, and others are let in.

        All that a script does after a step is done by then, and nothing that it does before the next one.
        """
        self.by_steps = True
        self.rejoin()
        if self._lets_in:
            try:
                self._let_in()
            except GivenUpError as error:
                self._note_given_up(error)
            self.rejoin()

    @property
    def is_given_up(self) -> bool:
        """Whether the others went on without this group, which has not joined them again."""
        return self._given_up is not None

    def stops(self) -> bool:
        """Whether all stop after this step; if somebody is silent, the others agree without."""
        while self._given_up is None and (answer := self.stop.now(self.method.step)) is not True:
            if answer is False:
                return False
            try:
                self._regroup(None, ready=False)
            except GivenUpError as error:
                self._note_given_up(error)
        return self._given_up is None

    def close(self) -> None:
        """Leave the run; the others learn of it at once."""
        self.membership.heartbeat.close("it was detached")

    # In a step.

    def before_update(self) -> bool:
        """Whether the step may be taken; collective where gradients were exchanged."""
        if self._given_up is None:
            try:
                return self._before_update()
            except GivenUpError as error:
                self._note_given_up(error)
        self.method.gradients.throw_away()
        if not self.by_steps:
            self.rejoin()
        return False

    def _before_update(self) -> bool:
        gradients = self.method.gradients
        if gradients.code is None or len(self.method.topology.groups) == 1:
            return True
        with self.membership.heartbeat.joint(_STEP):
            lost, ready = gradients.lost, gradients.lost is None
            if ready:
                lost = self._vote(commits=True, drawn=True)
            if lost is None:
                return True
            done = self._regroup(lost, ready=ready)
            if not done:
                gradients.throw_away()
                self._until_done(self._same_buffers, self._same_buffers)
                if not self.method.topology.rank:
                    log.warning("nobody takes the step after step %d: its gradients were lost", self.method.step)
            return done

    def _same_buffers(self) -> None:
        """The forward pass of a step that was skipped has changed running statistics."""
        gradients = self.method.gradients
        gradients.replicated.broadcast_buffers(gradients.members)

    def end_step(self) -> None:
        """End a step; where groups average, all of them or none."""
        try:
            self._end_step()
        except GivenUpError as error:
            self._note_given_up(error)
        if not self.by_steps:
            self.rejoin()

    def _end_step(self) -> None:
        method, votes = self.method, self.votes
        if self._trains_apart:
            self._follow_others()
        method.gradients.commit()  # the step is taken, whatever comes of its end
        if method.meets_next:
            if not self.together(self._count_and_end, _STEP):
                return
        else:
            self._until_done(self._count_and_end, again=method.settle)
        if len(method.topology.groups) == 1:  # with nobody to average with there was no vote
            self._vote(commits=True)
        self._leave_if_asked(after_average=self.votes > votes)
        if self._lets_in and not self.by_steps:  # all are at the same place of their scripts: where who joins begins
            self._let_in()

    def _let_in(self) -> None:
        """Go on with the groups that wait to be let in."""
        _call_all(self.on_admit)
        if self._lets_in and self._given_up is None:
            self._regroup(None, ready=False, admits=True)

    @property
    def _trains_apart(self) -> bool:
        return self.method.gradients.code is None and len(self.method.topology.groups) > 1

    def _leave_if_asked(self, *, after_average: bool) -> None:
        leaves = self.stop.leaves(after_average=after_average or not self._trains_apart)
        if self.membership.faults.on_term == "leave" and self.membership.slot.workers > 1:
            said = torch.tensor([float(leaves)])  # all of a group leave after the same step
            if (lost := attempt(lambda: self.method.wire.sum_in_group(said, "control"))) is not None:
                self._regroup(lost, ready=False)
                return
            leaves = bool(said)
        if not leaves:
            return
        group, step = self.membership.slot.group, self.method.step
        log.warning("group %d leaves after step %d, as SIGTERM asked; the others go on", group, step)
        self.membership.heartbeat.close("it left after SIGTERM")
        self.membership.leave_world()
        raise Left

    def _follow_others(self) -> None:
        """Form the next generation if others have lost a group and wait, or go to the average that they wait at.

        All of a group do so after the same step. Each of them learns of it at another time, and one that went on alone
        would wait in its next backward pass for one that did not.
        """
        method, due = self.method, self.method.next_event
        late = self.membership.holds_up(due) and due > method.step + 1
        said = torch.tensor([float(self.membership.heartbeat.is_called), float(late)])
        lost = attempt(lambda: method.wire.sum_in_group(said, "control"))
        if lost is not None or said[0]:
            self._regroup(lost, ready=False)
        elif said[1]:  # without the steps before it
            method.waits.skipped += due - 1 - method.step
            method.step = due - 1
        elif due <= method.step + 1:
            self.membership.arrive(method.step + 1)

    def _count_and_end(self) -> None:
        """Steps that were skipped, or that others took before this group came, have left no trace in its counters."""
        self.method.forwards = self.method.step + 1
        self.method.end_step()

    # What groups do together.

    def together(self, work: Callable[[], None], call: str, *, changes: bool = True, last: bool = False) -> bool:
        """Do work that all groups do together, on all of them or on none; whether it was done.

        If it `changes` nothing, there is no copy. Who has seen the `last` one leaves, and says so. A group that was
        given up has no part in it; at the end of a run it is lost.
        """
        if self._given_up is None:
            try:
                with self.membership.heartbeat.joint(call):
                    while not self._tried_together(work, changes=changes, commits=call == _STEP or last, last=last):
                        pass
                return True
            except GivenUpError as error:
                self._note_given_up(error)
        if last:
            raise LostError(f"{self._given_up}; it has no part in {call}")
        if call != _STEP:
            log.warning("group %d has no part in %s: it was given up", self.membership.slot.group, call)
        return False

    def _tried_together(self, work: Callable[[], None], *, changes: bool, commits: bool, last: bool) -> bool:
        copies: list[Undo] = []
        lost = attempt(lambda: copies.append(Undo(self.method))) if changes else None  # it waits for what is pending
        lost = lost or attempt(work)
        ready = lost is None
        lost = lost or self._vote(commits=commits)
        if lost is not None and ready and last and self.membership.was_seen(self.votes + 1):
            self.membership.heartbeat.close("finished")
            return True
        if lost is not None:
            undo = copies[0] if copies else None
            try:
                done = self._regroup(lost, ready=ready, undo=undo)
            except Exception as error:
                if undo is not None and not ready and (last or not isinstance(error, GivenUpError)):
                    undo.restore()  # whoever keeps this worker's model now gets one that was not averaged by half
                raise
            if not done:
                return False
        if last:
            self.membership.testify(self.votes)
        return True

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

        if not self.together(look, "merged()", changes=False):
            return  # this group evaluates what it has
        stack.enter_context(restored(model))
        with torch.no_grad():
            for t, value in zip((*model.parameters(), *model.buffers()), merged, strict=True):
                t.copy_(value)

    def _until_done(self, work: Callable[[], None], again: Callable[[], None]) -> None:
        """Do work that may be repeated."""
        while (lost := attempt(work)) is not None:
            self._regroup(lost, ready=False)
            work = again

    def _vote(self, *, commits: bool, drawn: bool = False) -> CollectiveError | None:
        """Wait until every worker has done its part; why that is not known, if it is not.

        If that `commits` what was trained, samples count from then on: also those of this step, if they are `drawn`.
        """
        found: list[Tensor] = []
        beat = self.membership.heartbeat.beat
        call = float(zlib.crc32(beat.call.encode()))
        wanted = float(self.membership.wanted > self.membership.generation)
        data = self.state.data
        come = [] if data is None else data.votes(drawn=drawn)
        mine = torch.tensor([wanted, call, -call, beat.step, -beat.step, *come], dtype=torch.float64)
        lost = attempt(lambda: found.append(self.method.wire.all_reduce_max(mine, "control")))
        if lost is None:
            wants, call, other, step, another, *come = found[0].tolist()
            if (call, step) != (-other, -another):
                lost = attempt(self._refuse_other_calls)
        if lost is None:
            if data is not None and commits:
                data.commit(come)
            self._count_votes(self.votes + 1)
            self._lets_in = bool(wants)
            self._in_vain = self._rejoins = 0
        return lost

    def _count_votes(self, votes: int) -> None:
        self.votes = votes
        self.membership.heartbeat.say(votes=votes)

    def _refuse_other_calls(self) -> None:
        """All workers have voted, but not on the same."""
        beat = self.membership.heartbeat.beat
        self._refuse(self.method.wire.all_gather_object((self.membership.slot.group, beat.call, beat.step)))

    def _refuse(self, where: list[tuple[int, str, int]]) -> None:
        places = "; ".join(f"group {group} is in {call} after step {step}" for group, call, step in sorted(set(where)))
        raise DisagreementError(
            f"groups wait for each other in different calls: {places}. All of them make the same calls after the same "
            "steps, also one that joins, whose script begins before its first step: `for step in replica.steps(total, "
            "folder=…, save_every=…)` does that, or save and evaluate by `replica.step` before the step"
        )

    # Other groups.

    def _regroup(
        self, lost: CollectiveError | None, *, ready: bool, undo: Undo | None = None, admits: bool = False
    ) -> bool:
        """Go on with the groups that are left, and those that want in if all of them admit that.

        Whether what was under way is done.
        """
        method, membership, before = self.method, self.membership, dict(self.membership.groups)
        report = self._report(lost, admits=admits)
        _call_all(self.on_regroup)
        method.abandon_pending()
        applied = method.state_dict() if ready or undo is None else {}
        for tries in range(len(before) + 1):
            reports = membership.renew(report)
            if any(set(own) - set(membership.groups.get(group, ())) for group, own in before.items()):
                _call_all(self.on_lost)
            membership.leave_world()  # only now: in this group somebody may have been in a backward pass
            done = ready and any(each.votes > self.votes for each in reports.values())
            self._refuse_what_cannot_help(lost, reports, before)
            if (again := attempt(self._open)) is None:
                break
            if tries == len(before):
                raise LostError(
                    f"groups that are left cannot reach one another ({again}); start all of them again, and resume "
                    "from a save"
                )
            report = report._replace(votes=self.votes, waited=0.0)
        if done:
            self._count_votes(self.votes + 1)
        state = applied
        if undo is not None and not done:
            undo.restore()
            state = undo.state
        method.load_state_dict(Saved(state["shared"], [state["local"]], 0, lambda: None, stays=True))
        method.abandon_pending()
        method.forwards = method.step
        self._lets_in = False
        self._deal_again(before, reports)
        self._record(before, lost)
        if membership.joined and (again := attempt(self._hand_over)) is not None:
            self._regroup(again, ready=False)
        return done

    def _deal_again(self, before: Groups, reports: Reports) -> None:
        """Samples of who is gone become the others', and those that come have their share."""
        if (data := self.state.data) is not None:
            order = [process for group in sorted(before) for process in before[group]]
            came = {r.process: Came(*r.data) for r in reports.values() if r.data is not None and not r.joins}
            data.again(order, came, self.method.topology.rank, self.method.topology.world_size)

    def _hand_over(self) -> None:
        """Give groups that join what this run has come to."""
        ranks, wire = self.membership.donor_and_new, self.method.wire
        gives = self.method.topology.rank == ranks[0]
        wire.broadcast_bytes(self.state.packed(votes=self.votes) if gives else None, ranks, "join")

    def _report(self, lost: CollectiveError | None, *, admits: bool) -> Report:
        beat, membership = self.membership.heartbeat.beat, self.membership
        return Report(
            *(membership.process, membership.slot.workers, False, self.votes, beat.call, beat.step),
            waited=0.0 if lost is None else lost.waited,
            why="" if lost is None else str(lost),
            admits=admits,
            data=None if self.state.data is None else list(self.state.data.says),
        )

    def _refuse_what_cannot_help(self, lost: CollectiveError | None, reports: Reports, before: Groups) -> None:
        """Groups in different calls, and a call that fails again and again although nobody is lost."""
        waiting = [(group, r.votes, r.call, r.step) for (group, _), r in reports.items() if r.call and not r.joins]
        for votes in {each[1] for each in waiting}:
            places = {each[2:] for each in waiting if each[1] == votes}
            if len(places) > 1:
                self._refuse([(group, call, step) for group, at, call, step in waiting if at == votes])
        caller = self.membership.caller  # the others only lost their connections to it
        why = next((r.why for (group, _), r in sorted(reports.items()) if group == caller and r.why), "")
        if lost is None or self.membership.groups != before or not why:
            return
        self._in_vain += 1
        if self._in_vain < _TRIES:
            if self.membership.slot[:2] == (caller, 0):
                log.warning("a collective failed (%s), and all groups are there: they try again", why)
        elif self.membership.slot.group == caller:
            raise lost.original
        else:
            raise OtherRankError(
                f"a collective failed {self._in_vain} times in a row although all groups were there: group {caller}: "
                f"{why}"
            )

    def _open(self) -> None:
        with self.membership.opened_world():
            self.method.wire.lay_out(self.membership.topology)

    def _record(self, before: Groups, lost: CollectiveError | None) -> None:
        """Note which groups went and came, in the events and the log."""
        now, came, step = self.membership.groups, self.membership.joined, self.method.step
        gone = sorted((before.keys() - now.keys()) | (before.keys() & came))
        if not gone and not came:
            return
        self.method.events.append(
            {"step": step, "event": "groups", "lost": gone, "came": sorted(came), "groups": len(now)}
        )
        if not self.method.topology.rank:
            for who, what in ((gone, "lost"), (sorted(came), "joined")):
                if who:
                    names = f"group{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
                    reason = self._reason(before, who, lost) if what == "lost" else ""
                    log.warning("%s %s after step %d, %d go on%s", names, what, step, len(now), reason)

    def _reason(self, before: Groups, who: list[int], lost: CollectiveError | None) -> str:
        known = [self.membership.last_words.get(process) for group in who for process in before[group]]
        words = next((each for each in known if each), None) or (str(lost) if lost is not None else "")
        return f" ({words})" if words else ""


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
