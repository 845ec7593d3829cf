"""A worker that ends before the others: it stops training, fails, is killed, or its script is over."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gang
import small
import thinwire
from covering import few
from patience import LIMIT_S, until
from selection import first_of
from thinwire.base.errors import MissingRankError
from thinwire.comm import missing, process_groups

HERE = Path(__file__).parent
SOON = {"GRACE_S": 1.0, "_SILENT_S": 3.0, "_CAUSE_S": 60.0, "_STORE_S": 120.0}
"""Shorter waits than users have where something will not come, longer ones where it only comes late here."""
REMEDY = "put `with replica.join():` around the loop, end all ranks after the same step by `replica.stop()`, or give"


class Ended(NamedTuple):
    """How a worker ended, and what it printed."""

    code: int
    said: str

    @property
    def last(self) -> str:
        return self.said.strip().splitlines()[-1]


def ended(
    folder: Path,
    how: str,
    method: str = "allreduce",
    *,
    odd: int = 1,
    workers: int = 2,
    keeper: str = "launcher",
    waits: dict[str, float] = SOON,
) -> list[Ended]:
    """How the workers of ends_early.py end, of which one is odd."""
    words = [str(folder), str(workers), str(odd), how, method, keeper, json.dumps(waits)]
    run_script([str(HERE / "ends_early.py"), *words])
    codes = json.loads((folder / "codes").read_text())
    return [Ended(code, (folder / f"said-{rank}").read_text()) for rank, code in enumerate(codes)]


def run_script(words: Sequence[str], **how: Any) -> int:
    """Run python, and end what it has started if it does not end itself."""
    path = os.pathsep.join([str(Path(thinwire.__file__).parents[1]), str(HERE)])
    surroundings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = subprocess.Popen([sys.executable, *words], env=surroundings, start_new_session=True, **how)
    try:
        return script.wait(LIMIT_S)
    finally:
        if script.poll() is None:
            os.killpg(script.pid, signal.SIGKILL)
            script.wait()


# It stops training and calls finish().


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method", "odd"),
    first_of(
        few(
            4,
            [
                ("breaks", "allreduce", 1),
                ("breaks", "localsgd", 1),  # the others go on until the next average
                ("in the middle of a step", "coded", 0),
                ("breaks", "each", 0),
                ("breaks", "allreduce", 0),
                ("in the middle of a step", "allreduce", 1),
                ("in the middle of a step", "localsgd", 0),
            ],
        )
    ),
)
def test_one_that_stops_early_says_who_has_gone_on(how: str, method: str, odd: int, tmp_path: Path) -> None:
    workers = ended(tmp_path, how, method, odd=odd)
    early, late = workers[odd], workers[1 - odd]
    assert early.code == late.code == 1
    assert (
        f"MissingRankError: finish() is collective: every rank must call it, and rank {1 - odd} did not;" in early.last
    )
    assert f"batches: rank {odd} is here after 3 steps, rank {1 - odd} is in step " in early.last
    assert REMEDY in early.last and "drop_last=True" in early.last
    assert late.last.startswith("thinwire: ranks took different numbers of batches: ")
    assert f"rank {odd} came to finish() after 3 steps, rank {1 - odd} was in step " in late.last
    assert REMEDY in late.last


@pytest.mark.slow
def test_it_waits_no_longer_than_is_said(tmp_path: Path) -> None:
    """By itself gloo waits for half an hour."""
    assert missing.GRACE_S == 10
    begun = time.monotonic()
    early, late, other = ended(tmp_path, "breaks", odd=0, workers=3, waits={})
    assert time.monotonic() - begun < 120
    assert early.code == late.code == other.code == 1 and "ranks 1, 2 did not" in early.last
    assert REMEDY in late.last and REMEDY in other.last


# Its script is over.


@pytest.mark.slow
@pytest.mark.parametrize("method", first_of(["allreduce", "localsgd"]))
def test_a_script_that_is_over_without_finish_is_named(method: str, tmp_path: Path) -> None:
    late, early = ended(tmp_path, "ends", method)
    assert (late.code, early.code) == (1, 0)
    assert late.last.startswith("thinwire: the script of rank 1 has ended after 3 steps, rank 0 was in step ")
    assert "; this error is a consequence of it; " in late.last and REMEDY in late.last


@pytest.mark.slow
def test_finish_on_one_rank_alone_is_said_at_once(tmp_path: Path) -> None:
    late, early = ended(tmp_path, "together, ends", waits={"GRACE_S": 1e9, "_SILENT_S": 1e9})
    assert (late.code, early.code) == (1, 0) and "and rank 1 did not; the script of rank 1 has ended" in late.last
    assert late.last.endswith("after 3 steps, rank 0 is here after 3; call finish() on all ranks")


@pytest.mark.slow
@pytest.mark.parametrize("how", few(2, ["raises", "together, ends", "breaks", "ends"]))
def test_a_store_that_ends_with_rank_0_is_no_hang(how: str, tmp_path: Path) -> None:
    early, *others = ended(tmp_path, how, odd=0, workers=3, keeper="rank 0")
    assert early.code == (0 if "ends" in how else 1)
    for other in others:
        assert other.code == 1 and "rank 0" in other.last


@pytest.mark.slow
def test_a_run_that_nobody_finishes_ends_without_a_word(tmp_path: Path) -> None:
    """Rank 0 keeps the store, and leaves first; torch would say that it is gone in a page of C++."""
    for worker in ended(tmp_path, "together, lingers", keeper="rank 0"):
        assert worker.code == 0 and "TCPStore" not in worker.said


# It fails.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method"), first_of([("raises", "allreduce"), ("raises", "localsgd"), ("raises after it has left", "each")])
)
def test_others_name_the_rank_that_failed_first(how: str, method: str, tmp_path: Path) -> None:
    late, early, other = ended(tmp_path, how, method, workers=3)
    for each in (late, other):
        assert each.code == 1 and "Traceback" in each.said
        assert each.last == (
            "thinwire: rank 1 failed first: ValueError: sample 17 is damaged; this error is a consequence of it"
        )
    assert early.code == 1 and "failed first" not in early.said


@pytest.mark.slow
def test_a_barrier_names_the_rank_that_failed(tmp_path: Path) -> None:
    late, early = ended(tmp_path, "together, raises", waits={"GRACE_S": 1e9, "_SILENT_S": 1e9})
    assert late.code == early.code == 1
    assert late.last.endswith("and rank 1 did not; rank 1 failed first: ValueError: sample 17 is damaged")


@pytest.mark.slow
def test_a_killed_rank_is_not_blamed_for_its_batches(tmp_path: Path) -> None:
    late, early = ended(tmp_path, "together, killed")
    assert (late.code, early.code) == (1, -signal.SIGKILL)
    assert "finish() is collective: every rank must call it, and rank 1 did not" in late.last
    assert "see what was printed there, and whether it was killed (" in late.last
    assert "batches" not in late.said and "join" not in late.said


@pytest.mark.slow
def test_torchrun_shows_which_rank_failed_first(tmp_path: Path) -> None:
    """torchrun itself ends those that are left, but not before they have seen their connections close."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, ends_early\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ends_early.train(int(os.environ['RANK']), 1, 'raises', 'allreduce')\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    with (tmp_path / "said").open("w") as said:
        assert run_script(torchrun, stdout=said, stderr=said) == 1
    assert "thinwire: rank 1 failed first: ValueError: sample 17 is damaged; this" in (tmp_path / "said").read_text()


# It only comes late.


def hurry() -> None:
    """In a worker: wait for nobody that has gone on."""
    missing.GRACE_S = 0.0
    missing._LOOK_S = 0.05
    process_groups._NOTE_S = 0.05


def attached(config: Any) -> tuple[thinwire.Replica, Any]:
    model = small.mlp()
    optimizer = small.sgd(model)
    return thinwire.attach(model, optimizer, config), optimizer


def late_for(rank: int, config: Any, case: str) -> int:
    """One rank comes to finish() much later; it has done things of its own, but has not gone on."""
    hurry()
    replica, optimizer = attached(config)
    if case == "uneven":
        with replica.join():
            list(small.walk(replica, optimizer, rank, 3 + 2 * rank))
    else:
        list(small.walk(replica, optimizer, rank, 4))
    if case == "twice":
        other, others = attached(config)
        list(small.walk(other, others, rank, 2))
        with other.merged():
            pass
        list(small.walk(replica, optimizer, rank, 1))
    if case == "pass" and rank == 1:
        replica(small.batch(rank, 9)[0])  # in train(), and for nothing
    if rank == 1:
        until(lambda: process_groups.notes((0,)).get(0) is not None and came_to_finish(), "the other rank")
        time.sleep(1)  # to be late by any measure, not to wait for anything
    replica.finish()
    return replica.step


def came_to_finish() -> bool:
    return process_groups.notes((0,))[0].call == "finish()"


@pytest.mark.parametrize(
    ("config", "case"),
    first_of(
        [
            (thinwire.LocalSGD(every=4), "uneven"),
            (thinwire.AllReduce(), "uneven"),
            (thinwire.AllReduce(), "pass"),
            (thinwire.LocalSGD(every=2), "even"),
            (thinwire.AllReduce(wire="int8"), "twice"),
        ]
    ),
)
def test_a_rank_that_is_only_late_is_waited_for(config: Any, case: str) -> None:
    first, second = gang.run(late_for, 2, config, case, fresh=True)
    assert first == second


def gives_up_and_tries_again(rank: int) -> list[str]:
    """Rank 0 comes to finish() early, is refused, takes the steps that it had left out, and comes again."""
    hurry()
    replica, optimizer = attached(thinwire.LocalSGD(every=50))
    found = []
    list(small.walk(replica, optimizer, rank, 3 + 3 * rank))
    if rank == 1:
        until(lambda: process_groups.posted("refused"), "the other rank's error")
    else:
        with pytest.raises(MissingRankError) as refused:
            replica.finish()
        found.append(str(refused.value))
        process_groups.post("refused", True)
        list(small.walk(replica, optimizer, rank, 3))
    replica.finish()
    return found


@pytest.mark.slow
def test_a_refused_call_may_be_made_again() -> None:
    (refused,), nothing = gang.run(gives_up_and_tries_again, 2, fresh=True)
    assert "rank 1 is in step " in refused and not nothing


def warned(rank: int, goes_on: bool) -> list[str]:
    """What rank 0 logs while it waits for the other one, which may have taken one more step."""
    missing._LONG_S, missing.GRACE_S, process_groups._NOTE_S = 0.5, LIMIT_S, 0.05
    said: list[str] = []
    replica, optimizer = attached(thinwire.LocalSGD(every=50))
    list(small.walk(replica, optimizer, rank, 3 + (goes_on and rank)))
    until(lambda: (found := process_groups.progress(1)) and found.step == 3 + goes_on, "a note of the last step")
    if rank == 1:
        until(lambda: process_groups.posted("warned"), "the warning")
    else:
        missing.log.addHandler(handler := logging.Handler())
        handler.emit = lambda record: (said.append(record.getMessage()), process_groups.post("warned", True))  # type: ignore
    with contextlib.suppress(thinwire.ThinwireError):  # who took one more step than others is found out then
        replica.finish()
    return said


def test_a_long_wait_is_a_warning_that_blames_batches_only_if_they_differ() -> None:
    quiet, uneven = (gang.run(warned, 2, goes_on, fresh=True)[0][0] for goes_on in (False, True))
    start = "rank 0 has waited 0 s in finish() for rank 1"
    assert quiet == f"{start}, rank 1 last in step 3; see what was printed there, and whether it was killed"
    assert uneven.startswith(f"{start}; ranks took different numbers of batches: rank 0 is here after 3 steps, rank 1")
    assert REMEDY in uneven
