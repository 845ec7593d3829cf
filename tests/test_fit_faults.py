"""`faults=` wherever a run begins: a group is killed, and the others go on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers import TIMEOUT, Launchers, held, note
from patience import until
from thinwire import AB, AllReduce, Faults, LocalSGD
from thinwire.recipes import named
from thinwire.train import fit

STEPS = 40
WAYS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "localsgd": LocalSGD(every=4, warmup=3),
    "ab": AB(total_steps=STEPS, warmup=5, every=4, factor_at=16, redecompose=2, cutoff=0.6),
}


def fitted(
    group: int, worker: int, name: str, out: str, dies: dict[int, int], hold: int = -1, resume: bool = False
) -> Any:
    """`fit`, in which groups die before a step, or wait at one until all are in."""
    torch.set_num_threads(1)
    from thinwire.train import loop

    real = loop.train_step

    def train_step(run: Any, batch: Any) -> Any:
        step = run.replica.step
        if step == 0:
            note(run.replica, "training")
        if dies.get(group) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == hold:
            held(run.replica)
        return real(run, batch)

    loop.train_step = train_step
    recipe = named("digits", steps=STEPS, eval_every=10, batch_size=60)
    return fit(recipe, WAYS[name], out=out, save_every=10, faults=Faults(timeout=TIMEOUT), resume=resume)


def finished(found: dict[tuple[int, int], Any], count: int, out: Path) -> dict[str, Any]:
    for slot, value in found.items():
        assert isinstance(value, dict), f"{slot}: {value}"
    assert len(found) == count
    summary = json.loads((out / "summary.json").read_text())
    assert {value["accuracy"] for value in found.values()} == {summary["accuracy"]}
    return summary


def records(out: Path, died: int, every: int = 4) -> list[dict[str, Any]]:
    """The lines; where rank 0 `died`, those of its steps until others noticed are missing, at their next average."""
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == sorted(set(steps)) and set(range(1, STEPS + 1)) - set(steps) <= {*range(died + 1, died + every)}
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dies"), [("localsgd", {1: 13}), ("allreduce", {0: 13}), ("ab", {0: 22})])
def test_fit_goes_on_without_a_group(name: str, dies: dict[int, int], tmp_path: Path) -> None:
    summary = finished(Launchers(fitted, 3, 1, name, str(tmp_path), dies).collect(), 2, tmp_path)
    assert summary["steps"] == STEPS and summary["accuracy"] > 0.5
    assert [event["lost"] for event in summary["events"] if event.get("event") == "groups"] == [list(dies)]
    lines = records(tmp_path, dies.get(0, STEPS))
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [10, 20, 30, 40, 40]
    assert [line["event"] for line in lines if line["kind"] == "event"] == ["groups"]
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-000020", "step-000030"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localsgd", "ab"])
def test_a_group_that_is_started_again_joins_fit(name: str, tmp_path: Path) -> None:
    """That of rank 0, which it becomes again."""
    launchers = Launchers(fitted, 3, 1, name, str(tmp_path), {0: 13}, 24)
    for group in (1, 2):
        launchers.wait_for(f"held/{group}")
    launchers.restart(0)
    launchers.args = (*launchers.args[:2], {}, -1)
    summary = finished(launchers.collect(), 3, tmp_path)
    assert summary["world_size"] == 3 and summary["ecr"]["full"] > 0
    lines = records(tmp_path, 13)
    assert [line["kind"] for line in lines].count("start") == 1
    assert [(line["lost"], line["came"]) for line in lines if line["kind"] == "event"] == [([0], []), ([], [0])]


@pytest.mark.slow
def test_fit_is_resumed_when_all_groups_have_died(tmp_path: Path) -> None:
    whole = finished(Launchers(fitted, 2, 1, "ab", str(tmp_path / "whole"), {}).collect(), 2, tmp_path / "whole")
    launchers = Launchers(fitted, 2, 1, "ab", str(tmp_path / "broken"), {0: 25, 1: 25})
    ended = [process for own in launchers.processes.values() for process in own]
    until(lambda: all(process.exitcode is not None for process in ended), "the end of all groups")
    launchers.args = (*launchers.args[:2], {}, -1, True)
    for group in range(2):
        launchers.start(group)
    summary = finished(launchers.collect(), 2, tmp_path / "broken")
    assert {name: summary[name] for name in ("loss", "accuracy", "ranks")} == {
        name: whole[name] for name in ("loss", "accuracy", "ranks")
    }
    kinds = [line["kind"] for line in records(tmp_path / "broken", STEPS)]
    assert (kinds.count("start"), kinds.count("resume")) == (2, 1)
