"""Law 6: stopping anywhere and resuming gives the parameters of never having stopped, bit for bit."""

import dataclasses
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
import thinwire
from selection import slow_but
from thinwire import ConfigError, ThinwireError
from thinwire.checkpoint.saves import newest
from thinwire.comm.buckets import checksum
from worlds import ab, adamw, optimizer_values, small_model, train_step, values

STEPS = 22
# One step in each phase: warm-up, a group phase's first step, its middle, rebound, a later cycle, the last phase.
STOPS = (2, 4, 7, 10, 13, 20)
METHODS = {
    "allreduce": thinwire.AllReduce(),
    "ab-paper": ab(total_steps=STEPS),
    "ab-paper carry": ab(total_steps=STEPS, moments="carry", wire="bf16"),
    "oialr": thinwire.OIALR(total_steps=STEPS, factor_at=4, redecompose=3, cutoff=0.2, layer_fraction=0.5),
}
PHASES = {"allreduce": {"train"}, "oialr": {"warmup", "lowrank"}}


def build(config: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    model = small_model(seed)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    return thinwire.attach(model, optimizer, config), optimizer, scheduler


def advance(replica: Any, optimizer: Any, scheduler: Any, start: int, end: int, rank: int) -> None:
    for step in range(start, end):
        replica.observe(train_step(replica, optimizer, step, rank))
        scheduler.step()


def fingerprint(replica: Any, optimizer: Any) -> tuple[int, int, int, str]:
    return values(replica), optimizer_values(optimizer), replica.step, replica.phase


def stop_and_resume(rank: int, config: Any, folder: str) -> tuple[list[Any], list[Any], list[Any]]:
    """An unbroken run that saves at every stop; then, from each save, another replica that goes on to the end.

    The first time that one is fresh, and the other times wherever it ended: a run can go back as well as on.
    """
    replica, optimizer, scheduler = build(config)
    schedules, phases, step = {}, [], 0
    for stop in STOPS:
        advance(replica, optimizer, scheduler, step, stop, rank)
        replica.save(Path(folder) / f"at-{stop}")
        schedules[stop], step = scheduler.state_dict(), stop
        phases.append(replica.phase)
    advance(replica, optimizer, scheduler, step, STEPS, rank)
    unbroken = [*fingerprint(replica, optimizer), replica.traffic.slow_bytes]
    other = build(config, seed=7)
    return unbroken, [resume_at(rank, other, folder, stop, schedules[stop]) for stop in STOPS], phases


def resume_at(rank: int, other: tuple[Any, Any, Any], folder: str, stop: int, schedule: Any) -> list[Any]:
    replica, optimizer, scheduler = other
    replica.load(Path(folder) / f"at-{stop}")
    scheduler.load_state_dict(schedule)
    for later in (s for s in STOPS if s > stop):
        advance(replica, optimizer, scheduler, replica.step, later, rank)
        replica.save(Path(folder) / "again")
    advance(replica, optimizer, scheduler, replica.step, STEPS, rank)
    return [*fingerprint(replica, optimizer), replica.traffic.slow_bytes]


def every_method(rank: int, group_size: Any, folder: str) -> dict[str, tuple[list[Any], list[Any], list[Any]]]:
    configs = {name: dataclasses.replace(config, group_size=group_size) for name, config in METHODS.items()}
    return {name: stop_and_resume(rank, config, f"{folder}/{name}") for name, config in configs.items()}


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "group_size"), [(2, 1), slow(1, None), slow(3, 2), slow(4, 2)])
def test_resuming_equals_never_having_stopped(tmp_path: Path, workers: int, group_size: Any) -> None:
    found = gang.run(every_method, workers, group_size, str(tmp_path))
    for method, (unbroken, resumed, phases) in (item for worker in found for item in worker.items()):
        for stop, result in zip(STOPS, resumed, strict=True):
            assert result[:4] == unbroken[:4], f"{method} resumed at {stop}"
            # Sums of node means are whole bytes; a load tells the layers' order again and compares a few counters.
            assert result[4] == pytest.approx(unbroken[4], rel=0.01, abs=5000)
        assert set(phases) == PHASES.get(method, {"warmup", "groups", "rebound", "final"})


def test_a_save_is_safetensors_and_json_and_whole(tmp_path: Path) -> None:
    replica, optimizer, scheduler = build(ab(group_size=None))
    advance(replica, optimizer, scheduler, 0, 7, 0)
    replica.save(tmp_path / "save")
    assert {path.suffix for path in (tmp_path / "save").iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "save" / "state.json").read_text())["method"]["phase"] == "groups"
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


def test_a_crash_while_saving_leaves_the_old_save(tmp_path: Path) -> None:
    replica, optimizer, scheduler = build(ab(group_size=None))
    advance(replica, optimizer, scheduler, 0, 3, 0)
    replica.save(tmp_path / "save")
    (tmp_path / "save.writing").mkdir()  # killed while it wrote
    (tmp_path / "save.writing" / "state.json").write_text("{")
    other, _, _ = build(ab(group_size=None), seed=3)
    other.load(tmp_path / "save")
    assert values(other) == values(replica)
    (tmp_path / "save").rename(tmp_path / "save.old")  # killed between the two renames
    assert newest(tmp_path / "save") == tmp_path / "save.old"
    other.load(tmp_path / "save")


def save_at(rank: int, folder: str) -> None:
    replica, optimizer, scheduler = build(ab(total_steps=STEPS))
    for stop in (3, 6):
        advance(replica, optimizer, scheduler, replica.step, stop, rank)
        replica.save(Path(folder) / f"at-{stop}")


def load_elsewhere(rank: int, folder: str) -> tuple[int, str]:
    replica, optimizer, scheduler = build(ab(total_steps=STEPS))
    replica.load(Path(folder) / "at-3")
    traffic, saved = replica.traffic.slow_bytes, replica.baseline()
    assert saved == json.loads((Path(folder) / "at-3" / "state.json").read_text())["baseline"]
    advance(replica, optimizer, scheduler, 3, STEPS, rank)
    assert replica.traffic.slow_bytes > traffic > 0
    # All-reduce would have sent 2 (n − 1) / n of the gradients a step: three times by four workers, then by two.
    grown = replica.baseline()["ideal_fp32"] - saved["ideal_fp32"]
    assert saved["ideal_fp32"] / 3 == pytest.approx(1.5 * grown / (STEPS - 3), rel=1e-3)
    return values(replica), replica.phase


def test_another_world_size_goes_on_from_a_merged_save(tmp_path: Path) -> None:
    gang.run(save_at, 4, str(tmp_path))
    results = gang.run(load_elsewhere, 2, str(tmp_path))
    assert results[0] == results[1] and results[0][1] == "final"


APART: dict[str, Any] = {
    "localsgd": thinwire.LocalSGD(every=4, warmup=2, wire="int2"),
    "ab": thinwire.AB(total_steps=26, warmup=2, every=4, factor_at=12, cutoff=0.3, redecompose=2),
    "plain": thinwire.LocalSGD(every=4, warmup=2),
    "shared": thinwire.LocalSGD(every=4, warmup=2, second_moment="shared"),
    "diloco": thinwire.DiLoCo(every=4, warmup=2, fragments=2, overlap=1),
    "daso": thinwire.DASO(total_steps=26, warmup=2, cooldown=2, every=4),
    "ab split": thinwire.AB(total_steps=26, warmup=2, every=4, factor_at=5, cutoff=0.3, train="split"),
    "ab paper": ab(total_steps=26, warmup=3, every=8, rebound=1, lr_rebound=1),
}
WORLDS = ((4, 5), (2, 10), (3, 15), (1, 20), (4, 26))
"""Workers, each a group, and the step up to which they train; all but the last stop between two averages."""


def train_in_a_world(rank: int, name: str, folder: str, saved: int | None, stop: int) -> tuple[int, int, int, bool]:
    """What this worker held at first and at last, the groups, and whether they held different models then."""
    model = small_model()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, dataclasses.replace(APART[name], group_size=1))
    if saved is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what groups that are gone have trained is lost
            replica.load(Path(folder) / str(saved))
    first = values(replica)
    for step in range(replica.step, stop):
        train_step(replica, optimizer, step, rank)
    apart = not replica._method.in_sync
    if stop == WORLDS[-1][1]:
        replica.finish()
    else:
        replica.save(Path(folder) / str(stop))
    return first, values(replica), replica.step, apart


@pytest.mark.parametrize("name", slow_but(("localsgd", "ab"), APART))
def test_groups_that_train_apart_are_resumed_by_more_and_by_fewer(tmp_path: Path, name: str) -> None:
    before, saved = [], None
    for workers, stop in WORLDS:
        found = gang.run(train_in_a_world, workers, name, str(tmp_path), saved, stop)
        for rank, (first, _, step, apart) in enumerate(found):
            assert step == stop and (apart or workers == 1 or stop == WORLDS[-1][1])
            assert not before or first == before[rank % len(before)], f"worker {rank} of {workers} at {saved}"
        before, saved = [last for _, last, _, _ in found], stop
    assert len(set(before)) == 1


PENDING = {
    "diloco": (7, thinwire.DiLoCo(warmup=2, every=4, overlap=2)),
    "fragments": (4, thinwire.DiLoCo(warmup=2, every=4, overlap=1, fragments=2, wire="int8")),
    "radial": (7, thinwire.DiLoCo(warmup=2, every=4, overlap=2, outer=thinwire.Radial())),
    "lowrank": (7, thinwire.DiLoCo(warmup=2, every=4, overlap=3, wire="lowrank:2")),
    "topk": (7, thinwire.DiLoCo(warmup=2, every=4, overlap=2, wire="topk:0.1")),
    "left out": (7, thinwire.DiLoCo(warmup=2, every=4, overlap=2, diverged="leave_out")),
    "localsgd": (7, thinwire.LocalSGD(warmup=2, every=4, overlap=2, fragments=3, wire="int8")),
    "ab": (8, thinwire.AB(total_steps=STEPS, warmup=2, every=3, factor_at=5, cutoff=0.3, overlap=1)),
    "daso": (9, thinwire.DASO(total_steps=STEPS, warmup=4, cooldown=4, every=4, overlap=2)),
    "daso mixed": (9, thinwire.DASO(total_steps=STEPS, warmup=4, cooldown=4, every=4, overlap=2, compensate=False)),
}
"""A step after which an average is under way, and the config."""


def save_while_pending(rank: int, name: str, folder: str) -> bool:
    stop, config = PENDING[name]
    replica, optimizer, scheduler = build(dataclasses.replace(config, group_size=1))
    advance(replica, optimizer, scheduler, 0, stop, rank)
    replica.save(folder)
    return any(part.pending for part in replica._method.averaged_tensors)


def finish_elsewhere(rank: int, name: str, folder: str) -> tuple[int, int]:
    """Go on to the end, saving and going back once; the digest, and that of the same without going back."""
    found = []
    for goes_back in (False, True):
        replica, optimizer, scheduler = build(dataclasses.replace(PENDING[name][1], group_size=1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what groups that are gone have trained is lost
            replica.load(folder)
        advance(replica, optimizer, scheduler, replica.step, 15, rank)
        replica.save(f"{folder}-15")
        if goes_back:
            kept = scheduler.state_dict()
            advance(replica, optimizer, scheduler, replica.step, 18, rank)
            replica.load(f"{folder}-15")
            scheduler.load_state_dict(kept)
        advance(replica, optimizer, scheduler, replica.step, STEPS, rank)
        replica.finish()
        found.append(values(replica))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("diloco",), PENDING))
def test_a_pending_average_may_be_loaded_by_fewer_and_by_more(tmp_path: Path, name: str) -> None:
    assert all(gang.run(save_while_pending, 2, name, str(tmp_path / "save")))
    for workers in (1, 3):
        found = gang.run(finish_elsewhere, workers, name, str(tmp_path / "save"))
        assert len({digest for own in found for digest in own}) == 1, f"{workers} workers"


COMPRESSING = {
    "int8": thinwire.AllReduce(wire="int8"),
    "powersgd": thinwire.PowerSGD(rank=2),
    "topk": thinwire.TopK(density=0.05),
    "onebit": thinwire.OneBit(),
}
LAYOUTS = (1, 2, "world")
MOVES = ((1, 2), (2, 1), ("world", 1), (1, "world"), ("alone", 2))
SETTINGS = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}


def compressing(name: str, group_size: Any, **settings: Any) -> tuple[Any, Any]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, **settings)
    return thinwire.attach(model, optimizer, dataclasses.replace(COMPRESSING[name], group_size=group_size)), optimizer


def save_compressing(rank: int, name: str, group_size: Any, folder: str) -> None:
    replica, optimizer = compressing(name, group_size, **SETTINGS)
    for step in range(2):
        train_step(replica, optimizer, step, rank)
    replica.save(folder)
    replica.detach()


def load_compressing(rank: int, name: str, group_size: Any, folder: str) -> tuple[int, int, dict[str, Any]]:
    """What every worker has two steps later, what this one had not sent before them, and whose optimizer it is."""
    replica, optimizer = compressing(name, group_size, momentum=0.5)
    replica.load(folder)
    unsent = checksum([t for bucket in replica._method.gradients.buckets for t in bucket.local().values()])
    for step in range(2, 4):
        train_step(replica, optimizer, step, rank)
    replica.detach()
    return values(replica), unsent, {key: optimizer.param_groups[0][key] for key in SETTINGS}


def move(rank: int, folder: str) -> dict[Any, tuple[int, int, dict[str, Any]]]:
    for name in COMPRESSING:
        for layout in LAYOUTS:
            save_compressing(rank, name, layout, f"{folder}/{name}-{layout}")
    return {
        (name, old, new): load_compressing(rank, name, new, f"{folder}/{name}-{old}")
        for name in COMPRESSING
        for old, new in MOVES
    }


@pytest.mark.slow
def test_other_groups_continue_from_what_was_not_sent(tmp_path: Path) -> None:
    for name in COMPRESSING:
        save_compressing(0, name, None, f"{tmp_path}/{name}-alone")
    everyone = gang.run(move, 4, str(tmp_path))
    for (name, old, new), (model, unsent, settings) in everyone[0].items():
        others = [found[name, old, new] for found in everyone]
        assert all(other[0] == model for other in others), (name, old, new)
        assert settings == SETTINGS, (name, old, new)
        if name == "powersgd" and new == 2:  # members of one group hold the same errors, all of them
            assert others[1][1] == unsent and others[2][1] == others[3][1]
    for name in COMPRESSING:
        assert load_compressing(0, name, None, f"{tmp_path}/{name}-1")[2] == SETTINGS


def become_several(rank: int, folder: str) -> list[int]:
    found = []
    for wire in ("fp32", "lowrank:2"):
        replica, optimizer, scheduler = build(ab(group_size=1, wire=wire))
        replica.load(f"{folder}/{wire}")
        assert replica.phase == "groups" and replica.step == 6
        advance(replica, optimizer, scheduler, 6, STEPS, rank)
        found.append(values(replica.finish()))
    return found


def test_a_lone_group_that_trains_factors_may_become_several(tmp_path: Path) -> None:
    for wire in ("fp32", "lowrank:2"):
        replica, optimizer, scheduler = build(ab(group_size=1, wire=wire))
        advance(replica, optimizer, scheduler, 0, 6, 0)
        replica.save(tmp_path / wire)
    first, second = gang.run(become_several, 2, str(tmp_path))
    assert first == second


def test_a_save_of_something_else_is_refused(tmp_path: Path) -> None:
    replica, optimizer, scheduler = build(ab(group_size=None))
    advance(replica, optimizer, scheduler, 0, 3, 0)
    replica.save(tmp_path / "save")
    other, _, _ = build(thinwire.AllReduce())
    with pytest.raises(ConfigError, match="method 'ab-paper', attached is 'allreduce'"):
        other.load(tmp_path / "save")
    changed, _, _ = build(ab(group_size=None, cutoff=0.3))
    with pytest.raises(ConfigError, match=r"cutoff=0\.2 there, 0\.3 here"):
        changed.load(tmp_path / "save")
    with pytest.raises(ConfigError, match="no saved folder"):
        replica.load(tmp_path / "nowhere")
    replica.finish()
    with pytest.raises(ThinwireError, match="after finish"):
        replica.save(tmp_path / "late")


def test_a_save_can_be_loaded_into_a_replica_of_any_shape(tmp_path: Path) -> None:
    replica, optimizer, scheduler = build(ab(total_steps=STEPS, group_size=None))
    saved = {}
    for stop in (3, 7, 10):
        advance(replica, optimizer, scheduler, replica.step, stop, 0)
        replica.save(tmp_path / f"at-{stop}")
        saved[stop] = fingerprint(replica, optimizer)
    for stop in (7, 3, 10, 7):
        replica.load(tmp_path / f"at-{stop}")
        assert fingerprint(replica, optimizer) == saved[stop]
