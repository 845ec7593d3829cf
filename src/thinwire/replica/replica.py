"""A model in training on many workers."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.checks import check_cutoff
from thinwire.base.errors import (
    AbandonedSaveError,
    ConsequenceError,
    DisagreementError,
    DivergedError,
    LostError,
    SaveError,
    ThinwireError,
    one_line,
)
from thinwire.checkpoint import also as beside
from thinwire.checkpoint import saves, snapshot
from thinwire.checkpoint.also import Also
from thinwire.checkpoint.loads import Loads
from thinwire.checkpoint.saves import Files, Save
from thinwire.checkpoint.state import RunState
from thinwire.comm.fsdp import ShardedModel, to_plain_shards, whole_of
from thinwire.comm.ledger import Ledger
from thinwire.comm.process_groups import next_number
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.config.settings import describe as describe_config
from thinwire.elastic.recovery import Recovery
from thinwire.elastic.stopping import ElasticStop, Stop, handle_signals, release_signals
from thinwire.exchange.agreement import Agreement
from thinwire.exchange.meetings import Waits
from thinwire.factor.layers import mark_as_read, weight_was_read
from thinwire.factor.plain import to_plain
from thinwire.methods.registry import name_of
from thinwire.methods.runner import Runner, untraced
from thinwire.replica.baseline import Baseline
from thinwire.replica.compiling import Recompilations, compile_in_place, undo_compile
from thinwire.replica.guards import (
    KeptParameters,
    agree_on_buffers,
    agree_on_loads,
    attached,
    check_parameters,
    guard_averages,
    refuse_evaluating,
    refuse_masters,
    refuse_state,
    refuse_wrappers,
    sign_as,
)
from thinwire.replica.notices import OneGroupNotice, log_finished, log_past_end
from thinwire.replica.stepping import SharedScale, Stepping
from thinwire.replica.steps import iterate, rescue
from thinwire.replica.uneven import Joining, refuse_joining

log = logging.getLogger("thinwire")


class Replica(nn.Module):
    """A model in training on many workers; call it as you would the model."""

    def __init__(
        self,
        method: Runner,
        *,
        scaler: Any = None,
        compile: dict[str, Any] | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        super().__init__()
        self.module = whole_of(method.model)
        self._method = method
        self._scaler = scaler
        self._release: list[Callable[[], None]] = []
        self._recovery = recovery
        self._joining: Joining | None = None
        self._has_voted = False  # on the step that optimizers are taking
        self._is_past_end = False
        self._is_skipped = False  # a group was lost, and nobody takes this step
        self._finished = False
        self._was_called = False
        self._state_is_known = False  # optimizers make it in their first step
        self._shows_merged = False
        self._save: Save | None = None
        self._save_error: SaveError | None = None  # of a save that ended before anybody asked
        self._stop: Stop | None = None
        self._stop_number = next_number()  # here, where all workers are: some may ask for a stop before others look
        self._recompiles = Recompilations()
        self._decomposed = 0  # how often, when moving averages were last looked for
        self.finished_ranks: dict[str, int] = {}
        """The rank of each weight that `finish` left as factors, by its key in the dense model's state dict."""
        self.read_layers: list[str] = []
        """Layers whose `.weight` other code reads, as known when the replica was finished."""
        self._full = _count(self.module)
        self._trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        self._baseline = Baseline(self._trained)
        self._state = RunState(
            method, scaler, read_baseline=self.baseline, begin_baseline=lambda b: self._baseline.begin(b, self.step)
        )
        # Here and not by a decorator: that would load Dynamo, seconds, with the package.
        self.forward = untraced(self.forward)  # type: ignore[method-assign]
        sign_as(self.forward, method.model)
        self._begin_step = torch.compiler.disable(self.traffic.times.begin_step)
        self.register_load_state_dict_pre_hook(_find_inner_keys)
        context = method.context
        scale = SharedScale(scaler, method.wire)
        self._agree_on_scale = scale.agree
        context.after_merge = scale.expect
        if scaler is not None:
            context.scale = scaler.get_scale
        if recovery is not None:
            recovery.state = self._state
            self._state.processes = recovery.membership.processes
            recovery.on_regroup.append(self._keep_baseline)
            recovery.on_lost.append(self._abandon_save)
            recovery.on_rejoin.append(self._forget_save)
            recovery.on_admit.append(self._settle_save)
        if recovery is not None and recovery.membership.joins:
            recovery.take_over()
        else:
            method.attach()
        if compile is not None:
            compile_in_place(self.module, compile)
        self._stepping = Stepping(
            method.optimizers,
            lr_factor=lambda: context.lr_factor(),
            before_update=self._before_update,
            after_update=self._after_update,
            end_step=self._end_step,
        )
        self._release += self._stepping.follow(scaler, self._agree_on_scale)
        self._kept_parameters = KeptParameters(method)
        self._loads = Loads(method)
        self._release += self._loads.follow()
        self._one_group = OneGroupNotice(self)
        if not method.only_gradients:
            self._watch_evaluations()
        self._guard_averages()
        attached.add(self)

    def _watch_evaluations(self) -> None:
        self._release += self._one_group.watch(self.module)

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In training, a pass whose backward averages gradients; else the bare module, without a collective."""
        if self._finished or not (self.training and torch.is_grad_enabled()):
            self._one_group.evaluates(self.module)
            return self.module(*args, **kwargs)
        if self._shows_merged:
            raise ThinwireError(
                "inside merged() the model is for evaluation: what is trained there would be thrown away"
            )
        refuse_wrappers(self, self._method, first=self.step == 0)
        refuse_evaluating(self._method)
        self._begin_again_if_loaded()
        self._stepping.batch()
        self._was_called = self._was_called or self._method.gradients.replicated.syncs
        self._begin_step()
        self._agree_on_scale()
        if self._joining is not None and self._method.gradients.replicated.syncs:
            self._joining.before_pass()
        return self._method.forward(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them, as DDP's `no_sync`."""
        with self._method.gradients.replicated.no_sync():
            yield

    def steps(
        self,
        total: int,
        *,
        folder: Path | str | None = None,
        save_every: int | None = None,
        keep: int = 2,
        scheduler: Any = None,
        also: Also | None = None,
    ) -> Iterator[int]:
        """Yield the number of each step to take, up to `total`, the same on all workers; collective.

            for step in replica.steps(10_000, folder="saves", save_every=500, scheduler=scheduler):
                x, y = batch(step)
                …
                optimizer.step()

        With a `folder`, a run goes on from the newest sound save in it, writes another every `save_every` steps and
        keeps the last `keep`. A `scheduler` is brought to each step here, so the loop does not call it: a group that
        joins, and a step that is skipped, then have the right rate. `also` is that of `save` and `load`; a group that
        joins is not given it. When a signal has asked for a stop, all workers save after the same step, and the
        process ends with exit code 75; after `stop()` the loop just ends.
        """
        return iterate(self, total, folder=folder, save_every=save_every, keep=keep, scheduler=scheduler, also=also)

    def stop(self, why: str = "stop()") -> None:
        """Ask all workers to stop after the same step, as early stopping does; any worker may, and goes on until then.

        `steps()` then ends, and `stop_requested()` is True, on all workers.
        """
        self._stops.asked = why

    def stop_requested(self) -> bool:
        """Whether a signal or `stop()` has asked for a stop: leave the loop; collective, but sends nothing.

        Call it once after each step, on all workers. From the first call until `finish()` or `detach()`, SIGTERM and
        SIGINT no longer end the process but are noted here, and a second one ends it at once.
        """
        handle_signals(self)
        return self._recovery.stops() if self._recovery is not None else bool(self._stops.now(self.step))

    @property
    def stopped_by(self) -> str | None:
        """What asked for a stop, such as "SIGTERM" or what was given to `stop()`."""
        return self._stops.why

    @property
    def _stops(self) -> Stop | ElasticStop:
        if self._recovery is not None:
            return self._recovery.stop
        if self._stop is None:
            self._stop = Stop(self.wire, self._stop_number)
        return self._stop

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop that may have fewer batches on some workers than on others; collective.

        A worker whose loop is over stays and does what the others wait for. Gradients are still divided by all
        workers; a group that trains apart and has trained nothing new has no weight in an average. All leave together.
        """
        refuse_joining(self._method, has_scaler=self._scaler is not None, has_faults=self._recovery is not None)
        if self._joining is not None:
            raise ThinwireError("join() inside join(): one around the loop is enough")
        self._method.wire.barrier("join()")
        self._joining = Joining(self._method, self._unrounded)
        try:
            yield
            if self.topology.world_size > 1 and self._joining.stay():
                self._stepping.expect_changes()
        finally:
            self._joining = None

    def observe(self, loss: float | Tensor) -> None:
        """Report a training loss: for weighted merges and to detect divergence."""
        self._method.observe(loss)

    def epoch_end(self, loss: float | Tensor | None = None) -> None:
        """Report the end of an epoch, with its mean training loss unless losses were observed; collective.

        For methods that go by epochs: DASO averages more often once the loss does not fall any more.
        """
        given = loss.detach().double().mean() if isinstance(loss, Tensor) else loss
        mean = None if given is None else float(given)
        self._together(lambda: _call_all(self._method.context.on_epoch_end, mean), "epoch_end()")

    @contextlib.contextmanager
    def merged(self) -> Iterator["Replica"]:
        """Give every worker the merged model for a while; collective. Its bytes count as "evaluate"."""
        self._refuse_other_flags()
        self._begin_again_if_loaded()
        with contextlib.ExitStack() as stack:
            if self._recovery is None:
                self._merge_into(stack)
            else:
                self._recovery.show_merged(self._merge_into, stack)
            self._stepping.expect_changes()
            self._shows_merged = True
            stack.callback(setattr, self, "_shows_merged", False)
            yield self

    def _merge_into(self, stack: contextlib.ExitStack) -> None:
        with self.traffic.booked_under("evaluate"), self._unrounded():
            self._method.wire.barrier("merged()")
            check_parameters(self._method, "merged()", finite=False)
            if not self.in_sync:
                stack.enter_context(self._method.merged())
                check_parameters(self._method, "merged()", everywhere=True, finite=False)
            stack.enter_context(self._method.optimizers.evaluation_weights())

    def finish(self, cutoff: float | None = None) -> nn.Module:
        """The trained model in plain, low-rank torch.nn layers; collective, once. The replica becomes it."""
        if self._finished:
            raise ThinwireError("finish() has run already: the replica is the finished model, replica.module")
        if cutoff is not None:
            check_cutoff(cutoff, zero_allowed=True)
        if not self.in_sync:
            self._refuse_other_flags()
        self._begin_again_if_loaded()
        try:
            self._together(lambda: self._finish(cutoff), "finish()", last=True)
        except (ConsequenceError, RuntimeError) as error:
            if self._recovery is None or isinstance(error, DivergedError):
                raise
            kind = DisagreementError if isinstance(error, DisagreementError) else LostError
            raise kind(f"finish() could not complete: {one_line(error)}. {rescue(self)}") from error
        self.detach()
        self.finished_ranks = {layer.key: layer.rank for layer in self._method.shape.layers if layer.rank}
        self.read_layers = [name for name, module in self.module.named_modules() if weight_was_read(module)]
        undo_compile(self.module)
        model = self._method.model
        self.module = to_plain_shards(model, self.wire) if isinstance(model, ShardedModel) else to_plain(self.module)
        self._finished = True
        self._log_finished()
        return self.module

    def _log_finished(self) -> None:
        sizes, ranks = (self._full, _count(self.module)), self.finished_ranks.values()
        log_finished(self._method, sizes, ranks, self.baseline()["allreduce_fp32"])

    def _finish(self, cutoff: float | None) -> None:
        self._method.wire.barrier("finish()")
        if (error := self._end_of_save()) is not None and self.topology.rank == 0:
            log.warning("%s", error)  # not raised: the model, which is worth more, would be lost
        check_parameters(self._method, "finish()", finite=False)
        for optimizer in self._method.optimizers.switching:
            optimizer.eval()
        with self._unrounded():
            self._method.finish(cutoff)
        check_parameters(self._method, "finish()", everywhere=True)
        agree_on_buffers(self._method)
        self._agree_on_read_weights()

    def before_step(self) -> None:
        """Where `steps()` begins a round: groups join here; collective."""
        if self._recovery is not None:
            self._recovery.before_step()

    @property
    def is_given_up(self) -> bool:
        """Whether the others went on without this worker's group; it joins them again before its next step."""
        return self._recovery is not None and self._recovery.is_given_up

    @property
    def may_lose_groups(self) -> bool:
        """Whether it was attached with `faults=`."""
        return self._recovery is not None

    @property
    def joined_late(self) -> bool:
        """Whether this worker's group has come to a run that was under way, and took over what it had."""
        return self._recovery is not None and self._recovery.joined_late

    def detach(self) -> None:
        """Release optimizer, scaler and model, in its present shape."""
        for release in self._release:
            release()
        self._release = []
        if self._recovery is not None:
            self._recovery.close()
        attached.discard(self)
        release_signals(self)
        self._method.release()

    def __deepcopy__(self, memo: Any) -> Any:
        raise ThinwireError(
            "a replica cannot be copied, its process groups are one of a kind: copy replica.module; for a moving "
            "average use thinwire.EMA(replica, decay) in place of AveragedModel(replica)"
        )

    def __getstate__(self) -> Any:
        raise ThinwireError(
            "a replica cannot be pickled: keep replica.state_dict() for the model, or replica.save(folder) for the run"
        )

    # State.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's state, with `X.weight_a` and `X.weight_b` where a layer is factored."""
        self._one_group.gives_state()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the plain model's state into its present shape; the same on all workers.

        All begin again from it before the next batch, save or average: without what groups agreed on before.
        """
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain model's parameters under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain model's buffers under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def save(self, folder: Path | str, *, wait: bool = True, also: Also | None = None) -> None:
        """Write model, optimizer, scaler, method and ledger to a folder all workers see; collective.

        `also` are by name what else the loop goes on from: schedulers, samplers, `torch.Generator`s,
        `thinwire.RandomState()` or any object with `state_dict` and `load_state_dict`. Each worker's own states are
        saved, as plain values and tensors; `load(folder, also=…)` gives them back.

        Without `wait` everything is copied to memory and written while training goes on. The folder appears, or
        replaces an older save there, when all workers have written. One save is written at a time: the next `save`,
        `load`, `finish` or `wait_for_save` waits for it. A save that cannot be written raises `SaveError` on all
        workers, here or, without `wait`, in the next `save`, after that one has begun, or in `wait_for_save`.
        """
        beside.check(also)
        self.save_with(folder, lambda: beside.captured(also, self.topology.rank), wait=wait)

    def save_with(
        self,
        folder: Path | str,
        more: Callable[[], Files],
        *,
        wait: bool = True,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Save as `save` does, with further files of this worker; collective.

        `more` returns them, in memory. All workers call it where the save begins, again if a group is lost there, so
        that the names of files may have ranks. `after` is called on rank 0, by a thread, when the save is in place.
        """
        earlier = self._end_of_save()  # before copies are made: memory holds those of one save
        self._refuse_finished("save()")
        self._refuse_other_flags()
        self._begin_again_if_loaded()
        self._together(lambda: self._begin_save(folder, more, wait, after), "save()", changes=False)
        if earlier is not None:
            raise earlier

    def _begin_save(self, folder: Path | str, more: Callable[[], Files], wait: bool, after: Callable[[], None]) -> None:
        files = self._captured()
        self._save = Save(folder, files | more(), self.wire, after=after)
        if wait:
            save, self._save = self._save, None
            save.wait()

    def wait_for_save(self) -> None:
        """Wait until a save that was begun is in place; collective. Raises `SaveError` if it could not be written."""
        if (error := self._end_of_save()) is not None:
            raise error

    def _captured(self) -> Files:
        self._method.wire.barrier("save()")
        check_parameters(self._method, "save()")
        return snapshot.capture(self._state)

    def _end_of_save(self) -> SaveError | None:
        save, failed = self._save, self._save_error
        self._save = self._save_error = None
        try:
            if save is not None:
                self._together(save.wait, "the end of a save", changes=False)
        except AbandonedSaveError as error:  # nothing is wrong with the disk, and the next save is of those left
            if self.topology.rank == 0:
                log.warning("%s", error)
        except SaveError as error:
            return error
        return failed

    def _abandon_save(self) -> None:
        """A group was lost, and with it its files of a save that is being written."""
        if self._save is not None:
            self._save.abandon()

    def _forget_save(self) -> None:
        """The others have ended it without this group."""
        self._abandon_save()
        self._save = None

    def _settle_save(self) -> None:
        """A group that comes has no part in a save that is being written; what failed is raised where it would be."""
        self._save_error = self._end_of_save()

    def load(self, folder: Path | str, *, check: bool = True, also: Also | None = None) -> None:
        """Continue from what `save` wrote; collective. Without `check`, files are not compared with their checksums.

        Each object in `also` gets the state that was saved under its name by this worker; in a world of another size,
        by rank 0.
        """
        self._refuse_finished("load()")
        self._refuse_other_flags()
        self.wait_for_save()
        if not self._together(lambda: self._load(folder, check=check, also=also), "load()", changes=False):
            raise LostError("this group was given up while it loaded a save; start it again to join")
        self._stepping.expect_changes()

    def resume(self, folder: Path | str, *, also: Also | None = None) -> Path | None:
        """Continue from the newest sound save in a folder of them, as `steps` writes them; collective.

        Returns the save, or None where there is none. `also` is that of `load`.
        """
        found: list[Path | None] = []

        def load() -> None:
            found.append(saves.find_sound_together(Path(folder), self.wire))
            if found[-1] is not None:
                self._load(found[-1], check=False, also=also)

        self._refuse_finished("resume()")
        self.wait_for_save()
        if not self._together(load, "load()", changes=False):
            raise LostError("this group was given up while it loaded a save; start it again to join")
        self._stepping.expect_changes()
        return found[-1]

    def _load(self, folder: Path | str, *, check: bool, also: Also | None) -> None:
        self._method.wire.barrier("load()")
        self._loads.clear()
        snapshot.load(self._state, folder, check=check, also=also)
        if self.ranks():
            guard_averages()

    def _begin_again_if_loaded(self) -> None:
        """All workers have loaded the same state since the last step, or say who has not; collective if one has."""
        if self._loads.were_noted:
            _begin_again_untraced()(self)

    def _begin_again(self) -> None:
        self._method.wire.barrier("load_state_dict()")
        if agree_on_loads(self._method, changed=self._loads.are_others):
            with self._unrounded():
                self._method.begin_again()

    # What it is doing.

    @property
    def traffic(self) -> Ledger:
        """What crossed the wire so far, counted for this worker's node."""
        return self._method.wire.ledger

    @property
    def wire(self) -> Wire:
        """Collectives between the workers."""
        return self._method.wire

    @property
    def topology(self) -> Topology:
        """The layout of workers, nodes and groups."""
        return self._method.topology

    @property
    def data_rank(self) -> int:
        """This worker's number for sharing out data: unlike a rank, it stays the same when groups come and go."""
        return self.topology.rank if self._recovery is None else self._recovery.membership.data_place[0]

    @property
    def data_world_size(self) -> int:
        """How many workers share the data when all groups are there."""
        return self.topology.world_size if self._recovery is None else self._recovery.membership.data_place[1]

    @property
    def phase(self) -> str:
        """The current phase."""
        return "finished" if self._finished else self._method.phase

    @property
    def phases(self) -> tuple[str, ...]:
        """Every name that `phase` may have."""
        return (*self._method.phases, "finished")

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._method.step

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same model now."""
        return self._finished or self._method.in_sync

    @property
    def needs_merged(self) -> bool:
        """Whether an evaluation needs `merged()`: workers hold different models, or not the weights to evaluate."""
        return not self._finished and (not self.in_sync or bool(self._method.optimizers.switching))

    @property
    def clips(self) -> bool:
        """Whether the method clips gradients itself; leave `clip_grad_norm_` out of the loop then."""
        return self._method.context.clips

    @property
    def recompilations(self) -> int:
        """How often torch.compile had to start again because shapes changed."""
        return self._recompiles.count

    @property
    def decompositions(self) -> int:
        """How often layers were decomposed in this run."""
        return self._method.shape.decompositions

    @property
    def found_ranks(self) -> dict[str, int]:
        """The ranks that layers had after the last decomposition."""
        return self._method.shape.found_ranks

    @property
    def agreement(self) -> Agreement | None:
        """How far groups agreed at the last average, where they average parameters."""
        return self._method.agreement

    @property
    def waits(self) -> Waits:
        """How long groups have waited for one another at averages."""
        return self._method.waits

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was decided during the run, such as to leave a group out, as plain values with their steps."""
        return self._method.events

    def factor_now(self) -> None:
        """Make factors of the weights at the next average, for AB runs whose length is not known; collective."""
        self._together(self._method.factor_now, "factor_now()")

    def ranks(self) -> dict[str, int]:
        """The rank of each layer that is factored now, by its label."""
        return {layer.label: layer.rank for layer in self._method.shape.layers if layer.is_factored and layer.rank}

    def describe(self) -> dict[str, Any]:
        """Method, layout and size, as plain values."""
        return {
            "method": name_of(self._method.config),
            "config": describe_config(self._method.config),
            "groups": [list(group) for group in self.topology.groups],
            "nodes": [list(node) for node in self.topology.nodes],
            "events": self._method.events,
            "agreement": self.agreement.summary() if self.agreement is not None else None,
            "waits": self.waits.summary(),
            "kept_full": [{"layer": kept.name, "why": kept.why} for kept in self._method.shape.kept],
            "parameters_full": self._full,
            "trainable_full": self._trained,
            "parameters": _count(self.module),
        }

    def numbers(self) -> dict[str, float]:
        """What a tracker may show of this worker: bytes, shares and rank; not collective, and does not wait.

        `traffic_vs_allreduce_fp32` is missing where nothing would be sent, `mean_rank` while no layer is factored.
        """
        sent, usual = self.traffic.slow_bytes, self.baseline()["allreduce_fp32"]
        ranks = (self.finished_ranks if self._finished else self.ranks()).values()
        found = {
            "slow_bytes": sent,
            "wire_share": self.traffic.wire_share,
        }
        found |= (
            {"traffic_vs_allreduce_fp32": (sent - self.traffic.slow_bytes_for("evaluate")) / usual} if usual else {}
        )
        return found | ({"mean_rank": fmean(ranks)} if ranks else {})

    def mean_traffic(self) -> Ledger:
        """The ledger as the mean over nodes; collective."""
        return self._method.wire.node_mean()

    def baseline(self, step: int | None = None) -> dict[str, int]:
        """Slow bytes per node that fp32 all-reduce, and an ideal one, would have sent so far, or by a later `step`."""
        return self._baseline.until(self.step if step is None else step, self.module, self.topology)

    # Steps.

    def _end_step(self) -> None:
        if self.topology.world_size > 1 and not self._was_called:
            raise ThinwireError(
                f"step {self.step + 1} used gradients that were not averaged over workers: since the last step the "
                "replica was not called in train() mode outside no_sync(); call replica(x), not the model, not in "
                "eval(), and the last batch of a step not in no_sync()"
            )
        self._was_called = self._has_voted = False
        self._refuse_other_flags()
        if not self._state_is_known:
            refuse_state(self._method)
            self._state_is_known = True
        refuse_masters(self._method)
        self.traffic.times.end_step()
        if self._is_skipped:
            self._is_skipped = False
            return
        data, commits = self._state.data, False
        if data is not None:
            data.trained, commits = data.drawn, self._commits_next
        with self._unrounded():
            if self._joining is not None and self.topology.world_size > 1:
                self._joining.end_step()
            else:
                self._method.end_step() if self._recovery is None else self._recovery.end_step()
        if data is not None and commits:
            data.commit([data.trained] * data.size)
        self._is_past_end = self._is_past_end or log_past_end(self._method)
        self._recompiles.update()
        self._kept_parameters.end_step()
        self._guard_averages()

    @property
    def _commits_next(self) -> bool:
        """Whether samples count after the next step; where groups may be lost, votes decide it."""
        method = self._method
        together = method.gradients.code is not None or len(method.topology.groups) == 1
        return self._recovery is None and (together or method.meets_next)

    def _guard_averages(self) -> None:
        """Where layers have just been factored."""
        if self._decomposed != self.decompositions:
            self._decomposed = self.decompositions
            guard_averages()

    @property
    def holds_one_model(self) -> bool:
        """Whether a state or an evaluation is of the model of all workers now, perhaps only until the next step."""
        return self._finished or self._shows_merged or self._method.holds_one_model

    def _before_update(self, optimizer: Optimizer) -> None:
        self._begin_again_if_loaded()
        if self._recovery is not None and not self._has_voted:  # before any of several optimizers, in whatever order
            self._has_voted = True
            self._is_skipped = not self._recovery.before_update()
        if self._joining is not None:
            self._joining.before_update(optimizer)
        if not self._is_skipped:
            _call_all(self._method.context.before_update, optimizer)

    def _after_update(self, optimizer: Optimizer) -> None:
        if self._joining is not None:
            self._joining.after_update(optimizer)
        if not self._is_skipped:
            _call_all(self._method.context.after_update, optimizer)

    def together(self, work: Callable[[], None], call: str) -> bool:
        """Do work in which all workers exchange something and change nothing of the run; collective.

        If a group is lost meanwhile, the others do it again. False in a group that was given up, which has no part
        in it. `call` is its name in errors.
        """
        return self._together(work, call, changes=False)

    def _together(self, work: Callable[[], None], call: str, *, changes: bool = True, last: bool = False) -> bool:
        """Do work that all groups do together; if one is lost, the others do it again. Whether it was done here."""
        if self._recovery is not None:
            return self._recovery.together(work, call, changes=changes, last=last)
        work()
        return True

    def _keep_baseline(self) -> None:
        """A world of another size takes the next steps."""
        self._baseline.begin(self.baseline(), self.step)

    def _unrounded(self) -> torch.autocast:
        """No autocast: it would round weights that are decomposed, merged or multiplied out."""
        device = next(self.module.parameters()).device.type
        return torch.autocast("cpu" if device == "meta" else device, enabled=False)

    def _agree_on_read_weights(self) -> None:
        """Rank 0 may have evaluated alone and read weights that others did not; all become the same model."""
        own = [name for name, module in self.module.named_modules() if weight_was_read(module)]
        for name in {name for names in self.wire.all_gather_object(own) for name in names}:
            mark_as_read(self.module.get_submodule(name))

    def _refuse_other_flags(self) -> None:
        self._method.gradients.replicated.refuse_other_flags(self.step)

    def _refuse_finished(self, call: str) -> None:
        if self._finished:
            raise ThinwireError(f"{call} after finish(): keep the finished model by its state_dict()")


@functools.cache
def _begin_again_untraced() -> Callable[[Replica], None]:
    """Keep Dynamo out where a compiled replica is called; a function that knows no replica keeps none alive."""

    def begin_again(replica: Replica) -> None:
        if replica._loads.are_new:
            replica._together(replica._begin_again, "load_state_dict()")
            replica._loads.clear()
            replica._stepping.expect_changes()

    return torch.compiler.disable(begin_again)


def stop_requested(replica: Replica) -> bool:
    """`replica.stop_requested()`, as a function."""
    return replica.stop_requested()


def _find_inner_keys(replica: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A module that holds a replica loads it by the names that `state_dict` gave, which do not have `module.`."""
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(inner)]:
        state[inner + key.removeprefix(prefix)] = state.pop(key)


def _call_all(callbacks: Sequence[Callable[[Any], None]], argument: Any) -> None:
    for callback in callbacks:
        callback(argument)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
