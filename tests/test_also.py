"""What else a loop goes on from: schedulers, samplers and random states in a save."""

import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import gang
import small
import thinwire
from thinwire import ConfigError

SCHEDULERS = {
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], [3]
    ),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


class Sampler:
    """Counts what it has given; its state has all that a save can hold."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[Any, Any]:
        return {"at": self.at, 3: (1, None, float("inf")), "seen": torch.arange(self.at), "counts": Counter("aab")}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.at, self.loaded = state["at"], state


def attached(make: Any = SCHEDULERS["onecycle"]) -> tuple[Any, Any, Any]:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(every=4, group_size=1))
    return replica, optimizer, make(optimizer)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_goes_on_as_if_it_had_not_stopped(kind: str, tmp_path: Path) -> None:
    rates: list[list[float]] = []
    for resumes in (False, True):
        replica, optimizer, scheduler = attached(SCHEDULERS[kind])
        if resumes:
            replica.load(tmp_path / "save", also={"scheduler": scheduler})
        rates.append([])
        for number in range(replica.step, 12):
            if number == 4 and not resumes:
                replica.save(tmp_path / "save", also={"scheduler": scheduler})
            small.step(replica, optimizer, 0, number)
            scheduler.step(*([1.0] if kind == "plateau" else []))
            rates[-1].append(optimizer.param_groups[0]["lr"])
        replica.detach()
    assert rates[0][4:] == rates[1]


def test_random_states_go_on_and_files_hold_no_pickle(tmp_path: Path) -> None:
    replica, _, _ = attached()
    generator, own = torch.Generator().manual_seed(3), thinwire.RandomState()

    def draw() -> tuple[float, ...]:
        own_pair = random.gauss(), np.random.normal()  # each leaves half a pair behind
        return *own_pair, torch.rand(()).item(), torch.rand((), generator=generator).item()

    draw()
    replica.save(tmp_path / "save", also={"generator": generator, "random": own})
    first = draw()
    replica.load(tmp_path / "save", also={"generator": generator, "random": own})
    assert draw() == first
    assert {path.suffix for path in (tmp_path / "save").iterdir()} == {".safetensors", ".json"}
    replica.save(tmp_path / "save")
    assert not [*(tmp_path / "save").glob("also*")]


def of_each_worker(rank: int, folder: str) -> int:
    replica, optimizer, _ = attached()
    sampler = Sampler(10 + rank)
    for step in replica.steps(4, folder=folder, save_every=2, also={"sampler": sampler}):
        sampler.at += 1
        small.step(replica, optimizer, rank, step)
    replica.detach()
    return sampler.at


def resumed(rank: int, folder: str) -> tuple[int, Any]:
    replica, _, _ = attached()
    sampler = Sampler()
    next(replica.steps(4, folder=folder, save_every=2, also={"sampler": sampler}))
    replica.detach()
    return sampler.at, sampler.loaded


def test_each_worker_gets_its_own_state_and_another_world_that_of_rank_0(tmp_path: Path) -> None:
    assert gang.run(of_each_worker, 2, str(tmp_path)) == [14, 15]
    found = gang.run(resumed, 2, str(tmp_path))
    assert [at for at, _ in found] == [12, 13]
    state = found[1][1]
    assert state == {**Sampler(13).state_dict(), "seen": state["seen"]} and torch.equal(state["seen"], torch.arange(13))
    assert type(state["counts"]) is Counter and type(state[3]) is tuple
    assert [at for at, _ in gang.run(resumed, 3, str(tmp_path))] == [12, 12, 12]
    assert [at for at, _ in gang.run(resumed, 1, str(tmp_path))] == [12]


def test_what_cannot_be_saved_or_is_not_there_is_refused_by_name(tmp_path: Path, caplog: Any) -> None:
    replica, optimizer, scheduler = attached()
    with pytest.raises(ConfigError, match=r"'loader'.* is list, which has no state_dict"):
        replica.save(tmp_path / "save", also={"loader": [1]})
    odd = Sampler()
    odd.state_dict = lambda: {"a": [0, {"b": np.arange(3)}]}  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=r"'odd' in `also` cannot be saved: `odd\.a\.1\.b` is ndarray.*without running"
    ):
        replica.save(tmp_path / "save", also={"odd": odd})
    with pytest.raises(ConfigError, match=r"`also`={'sampler'} of steps\(\) needs a `folder`"):
        replica.steps(4, also={"sampler": odd})
    assert not (tmp_path / "save").exists()
    replica.save(tmp_path / "save", also={"scheduler": scheduler, "sampler": Sampler()})
    small.step(replica, optimizer, 0, 0)
    with pytest.raises(ConfigError, match="no state of 'schedule', as `also` asks; there are 'scheduler', 'sampler'"):
        replica.load(tmp_path / "save", also={"schedule": scheduler})
    assert replica.step == 1
    with pytest.raises(ConfigError, match=r"the state of 'scheduler' in .* is not one of Sampler"):
        replica.load(tmp_path / "save", also={"scheduler": Sampler(), "sampler": Sampler()})
    with caplog.at_level(logging.WARNING, "thinwire"):
        replica.load(tmp_path / "save", also={"sampler": Sampler()})
    assert "also holds the state of scheduler, which is not loaded" in caplog.text
    replica.save(tmp_path / "plain")
    with pytest.raises(ConfigError, match="no state of 'scheduler', as `also` asks; it was saved without `also`"):
        replica.load(tmp_path / "plain", also={"scheduler": scheduler})
