"""Trajectories of every method: workers agree when they must, plans say what they send, and all is as it was.

Each file in `golden/` holds losses, norms of the parameters and bytes of one method in several situations. CPUs round
differently, so values are compared within a tolerance. `pytest --golden=bits` also compares digests of all bits, which
only holds on the machine and the version of torch that wrote them; `pytest --golden=write` rewrites the files,
of the situations that it runs.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import small
from every_method import STEPS
from selection import slow_but
from thinwire.comm.topology import arrange
from thinwire.methods.registry import METHODS, phases_of
from thinwire.plan.simulate import simulate
from thinwire.plan.workload import Workload
from trajectories import (
    CASES,
    CLIPPED,
    GROWING,
    LAYOUTS,
    LEFT_OUT,
    MORE,
    SITUATIONS,
    layouts,
    trajectories,
    without_one_group,
)

FOLDER = Path(__file__).parent / "golden"
ALL = (*CASES, *MORE)
OTHERS = [
    *((name, "3 groups of 1") for name in MORE),
    *((name, each) for each in ("saved and loaded", "2 groups of 2 shards") for name in ALL),
]
LOST = "a group of 3 lost"
variants = pytest.mark.parametrize(
    "name", [name if name in METHODS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
"""A method with its defaults in the quick suite; with other settings in the slow one."""


def _of(name: str, layout: str) -> list[dict[str, Any]]:
    """What each worker saw of a case; the defaults of all methods are run together, and so are other settings."""
    alike = tuple(case for case in CASES if (case in METHODS) == (name in METHODS))
    return [worker[name] for worker in trajectories(layout, alike)]


def _golden(seen: dict[str, Any]) -> dict[str, Any]:
    if "refused" in seen:
        return seen
    bits = "".join((*seen["parameters"], *seen["buffers"], *seen["state"]))
    few = {name: [float(f"{value:.7g}") for value in seen[name]] for name in ("losses", "norms")}
    sent = {"slow_bytes": seen["slow_bytes"]} if "slow_bytes" in seen else {}
    return few | {"bits": hashlib.sha256(bits.encode()).hexdigest()[:16]} | sent


def _write(file: Path, situation: str, own: list[dict[str, Any]]) -> None:
    """Put one situation's part into a file, in their order."""
    parts = {**(json.loads(file.read_text()) if file.exists() else {}), situation: own}
    rows = {each: ",\n  ".join(map(json.dumps, parts[each])) for each in SITUATIONS if each in parts}
    file.write_text("{\n" + ",\n".join(f' "{each}": [\n  {row}\n ]' for each, row in rows.items()) + "\n}\n")


def _compare(name: str, situation: str, found: list[dict[str, Any]], mode: str) -> None:
    """The first worker and the last with those in the file."""
    file, now = FOLDER / f"{name.replace(' ', '-')}.json", [_golden(found[rank]) for rank in (0, -1)]
    if mode == "write":
        _write(file, situation, now)
    for mine, golden in zip(now, json.loads(file.read_text())[situation], strict=True):
        assert mine.get("refused") == golden.get("refused")
        if "refused" not in mine:
            assert mine.get("slow_bytes") == golden.get("slow_bytes")
            assert mine["losses"] == pytest.approx(golden["losses"], rel=2e-3, nan_ok=True)
            assert mine["norms"] == pytest.approx(golden["norms"], rel=1e-3, nan_ok=True)
            assert mode != "bits" or mine["bits"] == golden["bits"]


@layouts
@variants
def test_a_trajectory_is_the_golden_one(name: str, layout: str, request: pytest.FixtureRequest) -> None:
    _compare(name, layout, _of(name, layout), request.config.getoption("--golden"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "situation"), OTHERS)
def test_saved_and_sharded_it_is_golden_too(name: str, situation: str, request: pytest.FixtureRequest) -> None:
    """Or refused, in these words."""
    names = ALL if situation not in LAYOUTS else tuple(MORE)
    found = [worker[name] for worker in trajectories(situation, names)]
    _compare(name, situation, found, request.config.getoption("--golden"))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("allreduce", "ab", "daso", "gossip", "slowmo", "localsgd shared"), ALL))
def test_without_a_group_that_died_it_is_golden_too(name: str, request: pytest.FixtureRequest) -> None:
    found = without_one_group(name, LOST)
    for seen in found:
        assert "refused" in seen or (len(found) == 2 and [1] in [event.get("lost") for event in seen["events"]])
    _compare(name, LOST, found, request.config.getoption("--golden"))


@pytest.mark.slow
def test_groups_are_screened_and_intervals_grow() -> None:
    """Or the golden runs of these would be of nothing."""
    by_rank = trajectories("3 groups of 1", tuple(MORE))
    for name, done in ((CLIPPED, "clipped"), (LEFT_OUT, "left out")):
        for worker in by_rank:
            assert [(event["event"], event["group"]) for event in worker[name]["events"]] == [(done, 2)], name
    parameters = zip(*(worker[GROWING]["parameters"] for worker in by_rank), strict=True)
    averages = [step for step, each in enumerate(parameters, 1) if step > 2 and len(set(each)) == 1]
    assert averages == [4, 6, 9, 14, 20, 21], "21 is after finish()"


@layouts
@variants
def test_workers_agree_when_they_must(name: str, layout: str) -> None:
    """In sync, all hold the same parameters, buffers and optimizer state; after an average, what it averages."""
    ranks, case = _of(name, layout), CASES[name]
    for step in range(1, STEPS + 1):
        must = {"parameters": case.parameters, "buffers": case.buffers, "state": case.optimizer}
        for what, due in must.items():
            if ranks[0]["in_sync"][step - 1] or due(step):
                assert len({seen[what][step - 1] for seen in ranks}) == 1, (what, step)
    assert len({seen["parameters"][-1] + seen["buffers"][-1] for seen in ranks}) == 1, "after finish()"


@layouts
@pytest.mark.parametrize("name", METHODS)
def test_members_of_a_group_always_agree(name: str, layout: str) -> None:
    ranks, size = _of(name, layout), LAYOUTS[layout][1]
    for group in (ranks[start : start + size] for start in range(0, len(ranks), size)):
        for what in ("parameters", "buffers", "state"):
            assert len({tuple(seen[what]) for seen in group}) == 1, what


@layouts
@pytest.mark.parametrize("name", METHODS)
def test_every_phase_is_named_and_happens(name: str, layout: str) -> None:
    seen, names = set(_of(name, layout)[0]["phases"]), phases_of(METHODS[name].example())
    assert seen <= set(names) and len(seen) >= len(names) - 1


@layouts
@pytest.mark.parametrize("name", METHODS)
def test_a_plan_says_what_the_ledger_then_counts(name: str, layout: str) -> None:
    workers, size = LAYOUTS[layout]
    seen = _of(name, layout)[0]
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    inputs = (small.batch(0, 0)[0],)
    workload = Workload(name=name, model=small.net(smooth=True), optimizer=optimizer, steps=STEPS, inputs=inputs)

    def ranks_as_found(layer: Any, progress: float, cutoff: float | None) -> int | None:
        at = round(progress * STEPS)
        return next(ranks for step, ranks in seen["ranks"] if step >= at).get(layer.label)

    config = METHODS[name].example(group_size=size)
    planned = simulate(workload, config, arrange(0, [0] * workers, size), ranks_as_found)
    assert [row[:-1] for row in planned.ledger.state()["rows"]] == seen["rows"]
    assert sum(planned.steps.values()) == STEPS
