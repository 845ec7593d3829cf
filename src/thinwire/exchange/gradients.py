"""The gradients of every step, averaged exactly inside a group and in a code between groups.

In fp32 and bf16 DistributedDataParallel does it over the whole world. In other codes it averages inside the group, over
the fast link, and groups exchange the means in the code, before anybody clips or steps; every worker's `.grad` then
holds the same values. With one worker per group that begins while the backward pass still computes, on a GPU in a
stream of its own if gloo carries it, else at its end. With one group nothing is coded.

What a code leaves out is kept for the next step. It changes only when a step is taken: an exchange whose gradients are
thrown away by `zero_grad()`, or whose step a GradScaler skips, leaves no trace.

A gradient that is not finite is not coded. Its worker says so with what it sends, so that all workers know at once:
without a GradScaler the run stops and names the worker and the layer; with one, all skip the step. This is where the
host waits for a GPU: at the end of the backward pass, until the last exchange says that all gradients are sound.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import CollectiveError, ConfigError, DivergedError, ThinwireError
from thinwire.codecs import aggregator
from thinwire.codecs.aggregate import Aggregator, State
from thinwire.comm.fsdp import whole_of
from thinwire.comm.topology import Ranks, Sent, Topology
from thinwire.comm.wire import Wire, attempt
from thinwire.config.common import parse_code
from thinwire.exchange.parts import (
    Exchange,
    Feature,
    MethodContext,
    Run,
    Saved,
    Schedule,
    refuses_code,
)

Make = Callable[[Wire, Sequence[Tensor]], Aggregator]
"""Builds an aggregator for parameters like these."""

_BUCKET = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Bytes of parameters that are exchanged at once: enough to be efficient, few enough that the last are not many."""


class GradientAveraging:
    """How gradients are averaged now: by the world in a code, or by each group alone."""

    def __init__(self, context: MethodContext) -> None:
        self.context = context
        self.wire = context.wire
        self.replicated = context.replicate(context.model, context.wire, context.ddp)
        self.code: str | None = None
        """None while groups train alone."""
        self.make: Make | None = None
        self.buckets: list[Aggregator] = []
        self._places: list[list[int]] = []
        self._early: EarlyBuckets | None = None
        self._outcomes: dict[int, tuple[int | None, bool]] = {}
        self.prepare: Callable[[Sequence[Tensor]], None] | None = None
        """Called with the group's mean gradients before they are exchanged in a code."""
        self._trained: list[nn.Parameter] = []
        self._names: list[str] = []
        self.scale = 1.0
        """What losses were multiplied by when residuals were left."""
        self.lost: CollectiveError | None = None
        """Why the last exchange failed, where workers go on without a group."""
        self._staged = False  # gradients were exchanged for a step that is not taken yet
        self._updated = False
        context.after_update.append(self.note_update)

    def together(self, code: str, make: Make | None = None) -> None:
        """From now on the world averages, in a code, which starts without residuals; `make` builds its aggregators."""
        self.check(code)
        self.code, self.make = code, make
        self._stop()
        self.scale = 1.0
        if self._is_coded:
            self._make_buckets()
        self._wrap()

    def apart(self) -> None:
        """From now on each group averages by itself."""
        self._stop()
        self.code = None
        was_coded = self.replicated.after_backward is not None
        if was_coded or self.replicated.members != self.topology.group or self.replicated.rounding != "fp32":
            self._wrap()  # a lone group continues with its wrapper as it is

    def _stop(self) -> None:
        self.buckets, self._places, self._staged = [], [], False
        if self._early is not None:
            self._early.stop()
            self._early = None

    def check(self, code: str) -> None:
        """Refuse what a code cannot carry: at once, not in the first backward pass."""
        if parse_code(code).is_exact or len(self.topology.groups) == 1:
            return
        for name, p in self.context.model.named_parameters():
            if p.is_complex() and p.requires_grad:
                raise ConfigError(
                    f"{code!r} cannot carry the gradient of the complex parameter {name!r}; use 'fp32' or 'bf16', or "
                    "hold both parts as two parameters"
                )

    @property
    def topology(self) -> Topology:
        return self.wire.topology

    @property
    def members(self) -> Ranks:
        """Who holds the same model after a step."""
        return self.topology.group if self.code is None else self.topology.world

    @property
    def _is_coded(self) -> bool:
        if self.code is None or len(self.topology.groups) == 1:
            return False
        # DDP's exchange would raise in the user's backward pass, and could not be taken back; and it knows no shards.
        return self.wire.outlives_groups or self.wire.is_sharded or not parse_code(self.code).is_exact

    def _wrap(self) -> None:
        replicated, coded = self.replicated, self._is_coded
        replicated.after_backward = self._exchange if coded else None
        replicated.before_backward = self._begin_backward if coded else None
        replicated.on_gradient = self._note_gradient if self._early is not None else None
        replicated.norm_members = self.members
        replicated.rounding = "bf16" if self.code == "bf16" and not coded else "fp32"
        replicated.wrap(self.topology.group if coded else self.members)

    def unwrap(self) -> None:
        """Let go of the model, whose parameters become others."""
        self.replicated.unwrap()
        self.replicated.members = ()  # none, so that a lone group wraps it again too

    def wrap_again(self) -> None:
        """Other parameters are trained than before."""
        self.unwrap()
        if self.code is None:
            self.apart()
        else:
            self.together(self.code, self.make)

    def rewrap(self) -> None:
        """Wrap the model again, as a checkpoint does on both of its sides."""
        self.replicated.wrap(self.replicated.members)

    def _make_buckets(self) -> None:
        """An aggregator for each few parameters, from the last layer on, as gradients arrive."""
        named = [(name, p) for name, p in self.context.model.named_parameters() if p.requires_grad]
        self._names, self._trained = [name for name, _ in named], [p for _, p in named]
        places: list[list[int]] = [[]]
        limit = _BUCKET.get(self._trained[0].device.type, _BUCKET["cuda"])
        for i in reversed(range(len(named))):
            # Of whole parameters: members of a group that shards them must cut alike.
            size = sum(whole_of(self._trained[j]).numel() for j in (i, *places[0]))
            if places[0] and 4 * size > limit:
                places.insert(0, [])
            places[0].insert(0, i)
        self._places = places[::-1]
        code = self.code or ""
        make = self.make or (lambda wire, like: aggregator(code, wire, like, "gradients"))
        wire = self.wire
        if self._can_begin_early:
            wire = self.wire.in_background()
            self._index = {id(p): i for i, p in enumerate(self._trained)}
            self._early = EarlyBuckets(self._places, self._exchange_bucket, self._trained[0].device)
        self.buckets = [make(wire, [self._trained[i].detach() for i in place]) for place in self._places]

    @property
    def _can_begin_early(self) -> bool:
        device = self._trained[0].device
        in_one_place = device.type in ("cpu", "cuda") and all(p.device == device for p in self._trained)
        # All workers must decide alike, so a group of one beside larger ones does not.
        alone = all(len(group) == 1 for group in self.topology.groups)
        in_one_piece = not (self.wire.outlives_groups or self.wire.is_sharded)
        return in_one_place and alone and self.prepare is None and in_one_piece

    # A step.

    def _begin_backward(self, parameter: Tensor | None = None) -> None:
        """Whoever set gradients to zero without a step has thrown away what the last exchange put there."""
        if self._staged:
            others = (p.grad for p in self._trained if p.grad is not None and p is not parameter)
            self._staged = any(bool(gradient.any()) for gradient in others)
        self._follow_scale()

    def _note_gradient(self, parameter: Tensor) -> None:
        # One more exchange of the same step needs all gradients at once.
        if self._early is not None and not self._staged:
            i = self._index[id(parameter)]
            self._early.arrived(i, self._names[i])

    def note_update(self, optimizer: Optimizer | None = None) -> None:
        """The step is taken, and not skipped."""
        self._updated = True

    def end_step(self) -> None:
        """Keep what the exchanges of this step left out, and agree on buffers."""
        self.commit()
        self.replicated.broadcast_buffers(self.members)

    def commit(self) -> None:
        """Keep what the exchanges of this step left out, unless the step was skipped; once."""
        if self._staged and self._updated:
            for bucket in self.buckets:
                bucket.commit()
        self._staged = self._updated = False

    def _exchange(self) -> None:
        """At the end of the backward pass: whatever was not exchanged while it went on."""
        if self.wire.outlives_groups:
            with self.wire.watch.joint("a step"):
                self.lost = attempt(self._exchange_now)  # for whoever takes the step; a backward pass raises nothing
        else:
            self._exchange_now()

    def _exchange_now(self) -> None:
        again, self._outcomes = self._staged, {}
        self.wire.ledger.times.average_gradients()
        if self._early is not None and not again:
            ledger = self.wire.ledger
            start = ledger.clock.mark()
            self._early.finish()
            ledger.waited("gradients", Sent(slow_queue=1), start, ledger.clock.mark())
        else:
            self._exchange_all(again)
        self._staged = all(healthy for _, healthy in self._outcomes.values())
        if not self._staged:
            self._refuse(next((bad for bad, _ in self._outcomes.values() if bad is not None), None))

    def _exchange_all(self, again: bool) -> None:
        for bucket, place in zip(self.buckets, self._places, strict=True) if again else ():
            bucket.take_back(self._gradients(place))
        gradients = self._gradients(range(len(self._trained)))
        if self.prepare is not None and self.wire.all_of_group(self._first_bad(gradients) is None):
            with torch.no_grad():
                self.prepare(gradients)
        for number in range(len(self.buckets)):
            self._exchange_bucket(number, again)

    def _exchange_bucket(self, number: int, again: bool = False) -> None:
        place = self._places[number]
        device = self._trained[0].device.type
        # The user's backward pass may stand in an autocast, which would round products here.
        with torch.no_grad(), torch.autocast("cpu" if device == "meta" else device, enabled=False):
            gradients = self._gradients(place)
            bad = self._first_bad(gradients)
            healthy = self.buckets[number].run(gradients, healthy=self.wire.all_of_group(bad is None), again=again)
        self._outcomes[number] = None if bad is None else place[bad], healthy

    def _gradients(self, place: Iterable[int]) -> list[Tensor]:
        """Those of some parameters; what was not used here counts as zero: others may have used it."""
        found = []
        for i in place:
            p = self._trained[i]
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                raise ConfigError(
                    f"{self._names[i]!r} has a sparse gradient, which cannot be coded: give it sparse=False"
                )
            found.append(p.grad)
        return found

    def _first_bad(self, gradients: Sequence[Tensor]) -> int | None:
        """The first parameter whose gradient is not finite."""

        def suspects() -> list[int]:
            norms = torch.stack(torch._foreach_norm(list(gradients)))
            return torch.nonzero(~torch.isfinite(norms)).flatten().tolist()  # or finite, but too large to be squared

        nothing: list[int] = []
        found = self.wire.read(suspects, nothing)
        return next((i for i in found if not bool(torch.isfinite(gradients[i]).all())), None)

    def _follow_scale(self) -> None:
        """What is kept is in units of the scaled gradient."""
        scale = self.context.scale()
        if scale != self.scale:
            for bucket in self.buckets:
                for t in bucket.residuals():
                    t.mul_(scale / self.scale)
            self.scale = scale

    def _refuse(self, bad: int | None) -> None:
        if self.context.has_scaler:
            for g in self._gradients(range(len(self._trained))):
                g.fill_(float("inf"))  # the scaler of every worker skips this step
            return
        found = self.wire.all_gather_scalars([-1 if bad is None else bad], "control")
        which = [(rank, self._names[int(row[0])]) for rank, row in enumerate(found) if row[0] >= 0]
        where = "; ".join(f"rank {rank} has one in {name!r}" for rank, name in which)
        raise DivergedError(
            f"a gradient is not finite at step {self.wire.ledger.times.begun}, so nothing was sent or applied: "
            f"{where}; lower the learning rate or go back to a checkpoint; if a GradScaler is to skip such steps, pass "
            "it to attach(…, scaler=scaler)"
        )

    def throw_away(self) -> None:
        """Nobody takes this step: what it left out is not kept, and there is nothing to apply."""
        self._staged, self.lost = False, None
        for p in self._trained:
            p.grad = None

    def forget(self) -> None:
        """Drop what exchanges left out: it belongs to parameters that are no more."""
        self._staged = False
        for bucket in self.buckets:
            bucket.forget()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The code, and what it left out so far."""
        shared = {"code": self.code, "scale": self.scale, "buckets": [b.shared() for b in self.buckets]}
        return {"shared": shared, "local": {"buckets": [b.local() for b in self.buckets]}}

    def load_state_dict(self, saved: Saved, make: Make | None) -> None:
        """Continue from this worker's state, or from those of another world."""
        shared, local = saved.shared["gradients"], saved.local
        if saved.stays:
            self.replicated.unwrap()  # the process groups it is on are gone
            self.replicated.members = ()
        if shared["code"] is None:
            self.apart()
        else:
            self.together(shared["code"], make)
        self.scale = shared["scale"]
        nothing: list[State] = [{}] * len(self.buckets)  # of a lone group, which codes nothing
        kept = shared["buckets"] or nothing
        own = None if local is None else local["gradients"]["buckets"] or nothing
        for i, bucket in enumerate(self.buckets):
            if own is not None:
                (bucket.keep if saved.stays else bucket.load)(kept[i], own[i])
            else:
                others = [worker["gradients"]["buckets"] for worker in saved.everyone]
                bucket.adopt(kept[i], [buckets[i] if buckets else {} for buckets in others])


class Gradients(Exchange):
    """Gradients, averaged over the world at every step in a code."""

    trains_apart = False

    def __init__(self, code: str, make: Make | None = None) -> None:
        """`make` builds other aggregators than the code's own."""
        self.code, self.make = code, make

    def attach(self, run: Run) -> None:
        super().attach(run)
        run.gradients.check(self.code)  # now, not after a warm-up
        self.schedule = Schedule(self)  # every step is like every other

    def begin(self, *, again: bool) -> None:
        if not again:
            self.run.gradients.together(self.code, self.make)

    def refuses(self, feature: Feature, config: Any) -> str | None:
        return refuses_code(self.code, feature, config)

    def role(self, topology: Topology) -> Hashable:
        """All workers do the same."""
        return None


class Background:
    """Runs what it is given in order, in one thread that ends when nobody can give it any more."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._under_way = 0
        # A daemon: at the end of a failed process nobody waits for a peer that will not answer.
        queues = self._work, self._done
        threading.Thread(target=_run, args=queues, name="thinwire-exchange", daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def submit(self, work: Callable[[], None]) -> None:
        """Run it after everything before it."""
        self._under_way += 1
        self._work.put(work)

    def join(self) -> None:
        """Wait for all of it; what failed first is raised here."""
        failed = [self._done.get() for _ in range(self._under_way)]
        self._under_way = 0
        if first := next((error for error in failed if error is not None), None):
            raise first

    def stop(self) -> None:
        """End the thread when its work is done."""
        self._work.put(None)


def _run(given: SimpleQueue[Callable[[], None] | None], done: SimpleQueue[BaseException | None]) -> None:
    while (work := given.get()) is not None:
        try:
            work()
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        del work  # it may hold the replica, which would then never go


class EarlyBuckets:
    """Buckets of gradients, exchanged in order and in the background as soon as all gradients of one are there.

    The first backward pass shows how often each gradient arrives: more than once where a parameter is used in several
    checkpointed parts of the model. A gradient that arrives after its bucket was sent is an error.
    """

    def __init__(self, places: Sequence[Sequence[int]], exchange: Callable[[int], None], device: torch.device) -> None:
        self._exchange = exchange
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sizes = [len(place) for place in places]
        self._bucket_of = {i: number for number, place in enumerate(places) for i in place}
        self._expected: dict[int, int] | None = None
        self._background = Background()
        self._restart()

    def _restart(self) -> None:
        self._seen = dict.fromkeys(self._bucket_of, 0)
        self._missing = list(self._sizes)
        self._sent = 0

    def arrived(self, i: int, name: str) -> None:
        """The gradient of parameter `i` is there."""
        self._send_complete()  # now, not when it became complete: other hooks of its last gradient have run since
        self._seen[i] += 1
        number = self._bucket_of[i]
        if number < self._sent:
            raise ThinwireError(
                f"the gradient of {name!r} arrived again after it was averaged: the model used it more often than in "
                "its first backward pass; call every pass but the last of a step in no_sync(), or use wire='bf16'"
            )
        if self._expected is not None and self._seen[i] == max(1, self._expected[i]):
            self._missing[number] -= 1

    def finish(self) -> None:
        """The backward pass is over: exchange what is left, and wait for all."""
        if self._expected is None:
            self._expected = dict(self._seen)
        while self._sent < len(self._sizes):
            self._send()
        self._restart()
        self._background.join()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def stop(self) -> None:
        """There will be no more."""
        self._background.stop()

    def _send_complete(self) -> None:
        while self._sent < len(self._sizes) and not self._missing[self._sent]:
            self._send()

    def _send(self) -> None:
        number = self._sent
        self._sent += 1
        if self._stream is None:
            self._background.submit(lambda: self._exchange(number))
            return
        computed = torch.cuda.current_stream(self._stream.device).record_event()
        self._background.submit(functools.partial(self._exchange_on_stream, self._stream, computed, number))

    def _exchange_on_stream(self, stream: torch.cuda.Stream, computed: torch.cuda.Event, number: int) -> None:
        """The backward pass goes on in its own stream, and whoever waits for this one waits in this thread."""
        with torch.cuda.stream(stream):
            stream.wait_event(computed)
            self._exchange(number)
