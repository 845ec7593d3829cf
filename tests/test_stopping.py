"""Signals: all workers stop after the same step, whoever heard it, and a second signal ends a process at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import gang
import small
import thinwire
from patience import LIMIT_S, until
from thinwire.comm import process_groups
from thinwire.elastic import stopping
from thinwire.recipes import named
from thinwire.train import fit

STEPS = 10_000
PATH = {"PYTHONPATH": str(Path(thinwire.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def stops(rank: int, config: Any, hears: dict[int, int], slow: int) -> tuple[int, str]:
    """The step a loop ends after, if `hears[rank]` is the step in which a worker gets a signal; one is slower."""
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    for number in small.walk(replica, optimizer, rank, STEPS):
        if hears.get(rank) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        if rank == slow:
            time.sleep(0.002)  # not to wait for anything, only to be late
        if thinwire.stop_requested(replica):
            break
    return replica.step, small.model_bits(replica.finish())


@pytest.mark.parametrize(
    ("config", "hears", "slow"),
    [
        (thinwire.AllReduce(), {1: 3}, 0),
        pytest.param(thinwire.LocalSGD(every=50), {0: 3}, 1, marks=pytest.mark.slow),  # one may be many steps ahead
        pytest.param(thinwire.LocalSGD(every=50), {0: 3, 1: 90}, 0, marks=pytest.mark.slow),
    ],
    ids=["in step", "apart", "at different times"],
)
def test_workers_stop_after_the_same_step(config: Any, hears: dict[int, int], slow: int) -> None:
    (first, model), (second, other) = gang.run(stops, 2, config, hears, slow, fresh=True)  # a request stays
    assert first == second < STEPS and model == other


def test_signals_mean_what_they_did_once_no_replica_looks_at_them() -> None:
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    first, second = (
        thinwire.attach(model, small.sgd(model), thinwire.AllReduce()) for model in (small.mlp(), small.mlp())
    )
    for replica in (first, second):
        assert not replica.stop_requested()
    first.detach()
    assert [signal.getsignal(number) for number in stopping.SIGNALS] != before
    second.finish()
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before


@pytest.mark.slow
def test_stops_are_numbered_anew_in_each_world() -> None:
    for _ in range(2):
        process_groups.open_world(dist.HashStore(), 0, 1, 60.0)
        assert [process_groups.next_number() for _ in range(3)] == [1, 2, 3]
        process_groups.leave()


def test_what_was_posted_is_found_until_it_is_removed() -> None:
    process_groups.open_world(dist.HashStore(), 0, 1, 60.0)
    for key in ("first", "second", "third"):
        process_groups.post(key, [key])
    process_groups.remove_posted(["first", "third", "never posted"])
    assert [process_groups.posted(key) for key in ("first", "second", "third")] == [None, ["second"], None]
    process_groups.leave()


def test_what_asks_groups_to_stop_is_named_a_signal_before_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    membership: Any = SimpleNamespace(heartbeat=SimpleNamespace(on_look=[]))
    stop = stopping.ElasticStop(membership)
    assert stop.why is None
    stop.asked = "the loss rises"
    assert stop.why == "the loss rises"
    monkeypatch.setattr(stopping, "requested", lambda: "SIGTERM")
    assert stop.why == "SIGTERM"
    stop.asked = None
    assert stop.why == "SIGTERM"


def waits(ready: str) -> None:
    with stopping.on_signals():
        Path(ready).touch()
        until(stopping.requested, "a signal")
        Path(f"{ready}-once").touch()
        # As deep in C as in a collective: no handler of Python's would run.
        os.read(os.pipe()[0], 1)


def test_a_second_signal_ends_a_process_that_waits_for_others(tmp_path: Path) -> None:
    process = gang.start(waits, str(tmp_path / "ready"))
    until((tmp_path / "ready").exists, "the process")
    os.kill(process.pid, signal.SIGTERM)
    until((tmp_path / "ready-once").exists, "the first signal")
    os.kill(process.pid, signal.SIGTERM)  # torchrun passes one on that workers have received themselves
    time.sleep(stopping._SAME_S + 0.2)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGINT)
    process.join(LIMIT_S)
    assert process.exitcode == 128 + signal.SIGINT


def stopped_fit(rank: int, out: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rank 1 is signalled before the first step; what fit returns, and the position it saved."""
    recipe = named("digits", steps=60)
    with stopping.on_signals():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stopped = fit(recipe, thinwire.LocalSGD(every=4), out=out, model=False)
    return stopped, json.loads(next(Path(out, "checkpoint").glob("*/position.json")).read_text())


def test_a_stopped_run_is_saved_and_says_where(tmp_path: Path) -> None:
    for stopped, position in gang.run(stopped_fit, 2, str(tmp_path / "run"), fresh=True):
        assert stopped == {"stopped_at": position["step"], "steps": 60, "stopped_by": "SIGTERM"}


@pytest.mark.slow
def test_a_signal_to_torchrun_stops_its_workers_in_order(tmp_path: Path) -> None:
    """As a batch system does it: to torchrun and to its workers, which then hear it twice."""
    out = tmp_path / "run"
    words = ["-m", "thinwire", "run", "digits", "--method", "allreduce", "--steps", "100000", "--out", str(out)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([*torchrun, *words], stderr=said, stdout=said, env={**os.environ, **PATH})
    until((out / "records.jsonl").exists, "the first step")
    workers = [int(path.name) for path in Path("/proc").iterdir() if _trains(path, str(out), process.pid)]
    assert len(workers) == 2
    for number in (process.pid, *workers):
        os.kill(number, signal.SIGTERM)
    process.wait(LIMIT_S)
    text = (tmp_path / "said").read_text()
    assert "thinwire: stopped by SIGTERM and saved after step" in text and "Traceback" not in text.split("thinwire:")[1]
    assert len(list((out / "checkpoint").iterdir())) == 1
    assert not any(Path("/proc", str(number)).exists() for number in workers)


def _trains(process: Path, out: str, parent: int) -> bool:
    try:
        return process.name.isdigit() and out in (process / "cmdline").read_text() and int(process.name) != parent
    except OSError:
        return False
