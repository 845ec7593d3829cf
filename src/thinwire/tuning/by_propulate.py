"""Search with Propulate: islands of workers over MPI, each worker a trial at a time, each trial on several ranks.

What Propulate needs to continue is in the trials' own files. Its own checkpoint is not read: it is a pickle, which can
run code, and it is written by one worker for all, so it lacks what others have evaluated since.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from thinwire.base.checks import check_whole, is_number
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.launch.launcher import free_port
from thinwire.tuning.evaluate import Ranks, devices_for, evaluate, place
from thinwire.tuning.search import Search, Trial
from thinwire.tuning.space import Code

_ATTEMPTS = 20
"""How often Propulate is asked for settings that are new; a small space has no others in the end."""
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PMIX_RANK")
_MISSING = (
    "searching with Propulate needs {what}: pip install 'thinwire[tune]' in an environment of its own (Propulate pins "
    "old versions of numpy and matplotlib), or use `--engine optuna` on one machine"
)

_PAUSE = 0.02
"""Seconds between looks. MPI itself looks without a pause, on a core that a trial needs."""


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """Propulate's settings; the defaults are the dissertation's (Tables A.3 and A.5)."""

    islands: int = 2
    generations: int = 10
    """Trials of each worker."""
    migration: float = 0.9
    """The probability that an island sends its best to the others after a generation."""
    pollination: bool = True
    """Whether it sends copies, and does not lose its best."""
    crossover: float = 0.7
    mutation: float = 0.4
    random_init: float = 0.1
    population: int | None = None
    """Trials of an island that its next one may descend from; None: twice its workers, and 4 at least."""

    def __post_init__(self) -> None:
        for name in ("islands", "generations"):
            check_whole(self, name, 1)
        if not (is_number(self.migration) and 0 <= self.migration <= 1):
            raise ConfigError(f"`migration`={self.migration!r} must be a probability, from 0 to 1")

    def described(self, workers: int) -> dict[str, Any]:
        """What a resumed search must have in common."""
        return {"engine": "propulate", "islands": self.islands, "at_once": workers}


def in_mpi() -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in os.environ for name in _SIZES)


class MpiRanks(Ranks):
    """The ranks of one trial."""

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self.comm, self.rank = comm, comm.rank
        node, node_of_all = (ranks.Split_type(MPI.COMM_TYPE_SHARED) for ranks in (comm, MPI.COMM_WORLD))
        super().__init__(comm.size, devices_for(node.allgather(int(node_of_all.rank))))
        self._here = node.rank
        self._local_world = node.size
        self._one_node = comm.allreduce(int(node.size == comm.size)) == comm.size

    def gather(self, value: Any) -> list[Any]:
        return self.comm.allgather(value)

    def share(self, value: Any) -> Any:
        return self.comm.bcast(value, root=0)

    def places(self) -> list[dict[str, str]]:
        host = "127.0.0.1" if self._one_node else os.uname().nodename
        address = self.share({"MASTER_ADDR": host, "MASTER_PORT": str(free_port())})
        return [address | place(self.rank, self.workers, self._here, self._local_world, self.devices)]


def check_installed() -> None:
    """Raise if a package is missing; without starting MPI, which importing mpi4py does."""
    for package in ("mpi4py", "propulate"):
        if find_spec(package) is None:
            raise ConfigError(_MISSING.format(what=f"the package {package}"))


def world() -> Any:
    """MPI's world; raises where something is missing."""
    check_installed()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(_MISSING.format(what="an MPI library")) from error
    return MPI.COMM_WORLD


def check_world(comm: Any, evolution: Evolution, ranks_per_trial: int) -> int:
    """Trials at once; raises if the ranks cannot be divided so."""
    each = evolution.islands * ranks_per_trial
    if comm.size % ranks_per_trial or comm.size < each:
        raise ConfigError(
            f"{comm.size} MPI ranks cannot be {evolution.islands} islands of trials on {ranks_per_trial} ranks each: "
            f"start a multiple of {ranks_per_trial}, {each} at least (mpirun -n {each} thinwire tune …)"
        )
    return int(comm.size) // ranks_per_trial


def search_by_propulate(search: Search, evolution: Evolution) -> None:
    """Run the search; called by all ranks. A rank that fails ends all: the others would wait for ever."""
    try:
        _search(search, evolution)
    except BaseException as error:
        if isinstance(error, ThinwireError | OSError):
            print(f"thinwire: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stderr.flush()
        world().Abort(1)


def _search(search: Search, evolution: Evolution) -> None:
    from mpi4py import MPI
    from propulate import Islands
    from propulate.utils import get_default_propagator

    comm = world()
    at_once = check_world(comm, evolution, search.job.workers)
    limits = {name: _parameter_limits(search, name) for name in search.space}
    crews: list[MpiRanks] = []  # made at the first trial, since only Propulate knows who is in it

    def loss_of(individual: Any, trial_comm: Any = None) -> float:
        """What Propulate minimises; called on all ranks of a trial."""
        if not crews:
            crews.append(MpiRanks(trial_comm or MPI.COMM_SELF))
        ranks = crews[0]
        trial = None
        if ranks.rank == 0:
            codes = {name: individual[name] for name in search.space}
            trial = pending.taken() or search.begin(codes, int(individual.island), int(individual.rank))
        loss = evaluate(search, ranks.share(trial), ranks)
        if not ranks.share(search.has_time):
            islands.propulator.generations = 0  # after this trial the loop of this worker ends
        return loss

    chance = random.Random(f"{search.seed} {comm.rank} {len(search.trials())}")
    propagator = get_default_propagator(
        pop_size=evolution.population or max(4, 2 * at_once // evolution.islands),
        limits=limits,
        crossover_prob=evolution.crossover,
        mutation_prob=evolution.mutation,
        random_init_prob=evolution.random_init,
        rng=chance,
    )
    pending = Pending(propagator, limits, search.was_tried)
    with tempfile.TemporaryDirectory(prefix="thinwire-tune-") as unused:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # it prints a banner
            islands = Islands(
                loss_fn=loss_of,
                propagator=pending,
                rng=chance,
                generations=evolution.generations,
                num_islands=evolution.islands,
                migration_probability=evolution.migration,
                pollination=evolution.pollination,
                checkpoint_path=unused,
                ranks_per_worker=search.job.workers,
            )
        used = unblock(islands.propulator)
        _restore(islands.propulator, search, pending, limits)
        islands.propulate(logging_interval=10**9, debug=0)
        for own in used:
            own.finish()
        NonBlocking(comm).barrier()


def _parameter_limits(search: Search, name: str) -> tuple[Code, Code]:
    """As Propulate wants them: whole numbers for codes that are, so that it does not look between them."""
    parameter = search.space[name]
    low, high = parameter.limits
    return (int(low), int(high)) if parameter.is_whole else (float(low), float(high))


class Pending:
    """Propulate's propagator, which first gives the trial that a killed search had begun, or the usual settings.

    Small populations breed what they had before, above all where most parameters are choices: it is asked again then.
    """

    def __init__(
        self, propagator: Any, limits: Mapping[str, tuple[Code, Code]], was_tried: Callable[[Mapping[str, Code]], bool]
    ) -> None:
        self.propagator, self.limits, self.was_tried = propagator, limits, was_tried
        self.trials: list[Trial] = []
        self.usual: Mapping[str, Code] | None = None
        self._given: list[Trial] = []

    def __call__(self, population: list[Any]) -> Any:
        if self.trials:
            self._given.append(self.trials.pop(0))
            return _individual(self._given[-1].codes, self.limits)
        if self.usual is not None:
            codes, self.usual = self.usual, None
            return _individual(codes, self.limits)
        for _ in range(_ATTEMPTS):
            bred = self.propagator(population)
            if not self.was_tried({name: bred[name] for name in self.limits}):
                break
        return bred

    def taken(self) -> Trial | None:
        """The begun trial that was given last, once; nothing if what was given is new."""
        return self._given.pop() if self._given else None


def _individual(codes: Mapping[str, Code], limits: Mapping[str, tuple[Code, Code]], **more: Any) -> Any:
    """Codes as Propulate wants them, of the types that it checks for."""
    from propulate.population import Individual

    return Individual({name: type(limits[name][0])(code) for name, code in codes.items()}, dict(limits), **more)


def _restore(propulator: Any, search: Search, pending: Pending, limits: Mapping[str, tuple[Code, Code]]) -> None:
    """Give the propulator of this rank what its island has evaluated before, and what its worker had begun."""
    if propulator.propulate_comm is None:
        return  # not the first rank of a trial: that one informs it
    begun = search.trials()
    if not begun and propulator.propulate_comm.rank == 0:
        pending.usual = search.usual()
    own = [trial for trial in begun if trial.island == propulator.island_idx]
    for trial in own:
        if not trial.has_ended:
            continue
        individual = _individual(trial.codes, limits, generation=trial.generation, rank=trial.worker)
        individual.loss, individual.island, individual.current = trial.loss, trial.island, trial.worker
        individual.migration_steps, individual.migration_history = 0, str(trial.island)
        propulator.population.append(individual)
    mine = [trial for trial in own if trial.worker == propulator.island_comm.rank]
    propulator.generation = sum(trial.has_ended for trial in mine)
    pending.trials = sorted((trial for trial in mine if not trial.has_ended), key=lambda trial: trial.generation)


class NonBlocking:
    """A communicator of mpi4py whose `send` returns at once, and whose `barrier` leaves the core to others.

    Propulate sends with MPI's blocking `send`, which may wait until the receiver calls MPI itself. Open MPI 5 does so
    over shared memory, inside a node, however small the message is; and the receiver calls MPI after its trial. So
    islands would wait for each other's trials.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._sent: list[Any] = []
        """Requests hold what they send, so they are kept until it has been received."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        """Send without waiting for the receiver."""
        self._forget_received()
        self._sent.append(self._comm.isend(value, dest=dest, tag=tag))

    def barrier(self) -> None:
        """Wait for all."""
        reached = self._comm.Ibarrier()
        while not reached.Test():
            time.sleep(_PAUSE)

    def finish(self) -> None:
        """Take what nobody asked for any more, until everything is received; called by all."""
        reached = None
        while reached is None or not reached.Test():
            while self._comm.iprobe():
                self._comm.recv()
            self._forget_received()
            if reached is None and not self._sent:
                reached = self._comm.Ibarrier()
            time.sleep(_PAUSE)

    def _forget_received(self) -> None:
        self._sent = [request for request in self._sent if not request.test()[0]]


def unblock(propulator: Any) -> list[NonBlocking]:
    """Make no worker wait for another's trial; returns the communicators, none where a rank only helps in trials."""
    if propulator.propulate_comm is None:
        return []
    propulator.propulate_comm = NonBlocking(propulator.propulate_comm)
    propulator.island_comm = NonBlocking(propulator.island_comm)
    return [propulator.propulate_comm, propulator.island_comm]
