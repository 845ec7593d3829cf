"""Moving averages through changes of shape, saves and the end of a run."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gang
import small
import thinwire
from thinwire.base.errors import ConfigError, ThinwireError

METHODS: dict[str, Callable[[], Any]] = {
    "allreduce": thinwire.AllReduce,
    "ab-paper": small.ab,
    "oialr": lambda: thinwire.OIALR(total_steps=small.STEPS, factor_at=4, redecompose=5, cutoff=0.3),
    "localsgd": lambda: thinwire.LocalSGD(every=4),
}
DECAY = 0.8


def full_weights(model: nn.Module, names: list[str]) -> list[Tensor]:
    """Every weight as it is read."""
    places = [name.rpartition(".") for name in names]
    return [getattr(model.get_submodule(path), weight) for path, _, weight in places]


def follow(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config in METHODS.items():
        model = small.net()
        names = [n for n, _ in model.named_parameters()]
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, config())
        ema = thinwire.EMA(replica, DECAY)
        by_hand: list[Tensor] = []
        for number in small.walk(replica, optimizer, rank):
            ema.update_parameters(replica)
            now = [w.detach().clone() for w in full_weights(copy.deepcopy(model), names)]
            by_hand = [torch.lerp(e, w, 1 - DECAY) for e, w in zip(by_hand, now, strict=True)] if by_hand else now
            if number == 5:  # in the middle of a group phase
                replica.save(Path(folder) / name)
        gaps = [float((p - q).abs().max()) for p, q in zip(ema.module.parameters(), by_hand, strict=True)]
        with pytest.raises(ThinwireError, match=r"call EMA.finish\(\) after replica.finish\(\)"):
            ema.finish()
        finished = replica.finish()
        own = small.model_bits(ema.module)
        averaged = ema.finish()
        x, _ = small.batch(7, 7)
        found[name] = {
            "gap": max(gaps),
            "own": own,
            "averaged": small.model_bits(averaged),
            "keys": list(averaged.state_dict()) == list(finished.state_dict()),
            "sizes": [sum(p.numel() for p in m.parameters()) for m in (finished, averaged)],
            "finite": bool(averaged(x).isfinite().all()),
            "booked": replica.traffic.by_purpose.get("ema", {}).get("slow_bytes", 0),
        }
        found[name]["resumed"] = resume(rank, config(), Path(folder) / name) == found[name]["averaged"]
    return found


def resume(rank: int, config: Any, folder: Path) -> str:
    model = small.net(seed=1)
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    ema = thinwire.EMA(replica, DECAY)
    replica.load(folder)
    for number in range(6, small.STEPS):
        small.step(replica, optimizer, rank, number)
        ema.update_parameters()
    replica.finish()
    return small.model_bits(ema.finish())


@pytest.mark.slow
def test_an_average_follows_every_method_through_save_and_finish(tmp_path: Path) -> None:
    here, there = gang.run(follow, 2, str(tmp_path))
    for name, mine in here.items():
        assert mine["gap"] < 1e-6, name
        assert mine["averaged"] == there[name]["averaged"]
        assert mine["resumed"] and there[name]["resumed"], name
        assert mine["keys"] and mine["finite"] and mine["sizes"][0] == mine["sizes"][1]
        # Groups that trained apart have averages of their own until the end.
        assert (mine["own"] != there[name]["own"]) == (name in ("ab-paper", "localsgd"))
        assert mine["booked"] > 0


def save_merged(rank: int, folder: str) -> list[Tensor]:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    ema = thinwire.EMA(replica, DECAY)
    for _ in small.walk(replica, optimizer, rank, 8):
        ema.update_parameters()
    assert replica.phase == "rebound"
    replica.save(folder)
    return [p.detach().clone() for p in ema.module.parameters()]


def test_another_world_starts_from_the_mean_of_the_averages(tmp_path: Path) -> None:
    here, there = gang.run(save_merged, 2, str(tmp_path / "save"))
    model = small.net(seed=1)
    replica = thinwire.attach(model, small.sgd(model), small.ab())
    ema = thinwire.EMA(replica, DECAY)
    replica.load(tmp_path / "save")
    for p, one, other in zip(ema.module.parameters(), here, there, strict=True):
        torch.testing.assert_close(p, (one + other) / 2)
    model = small.net(seed=1)
    with pytest.warns(UserWarning, match="more moving averages than the 0 here"):
        thinwire.attach(model, small.sgd(model), small.ab()).load(tmp_path / "save")


def test_with_plain_training_it_is_torchs_own(tmp_path: Path) -> None:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    ours = thinwire.EMA(replica, DECAY)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in small.walk(replica, optimizer, 0):
        ours.update_parameters(replica)
        theirs.update_parameters(model)
    assert small.same(dict(ours.state_dict()), dict(theirs.state_dict()))
    x, _ = small.batch(0, 0)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    torch.save(ours.module, tmp_path / "average.pt")  # nothing of a replica is in it


def test_mistakes_are_said() -> None:
    model = small.net()
    replica = thinwire.attach(model, small.sgd(model), small.ab())
    with pytest.raises(ConfigError, match="EMA takes a replica, not Net; make it after attach"):
        thinwire.EMA(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`decay`=1\.5 must be from 0 to below 1"):
        thinwire.EMA(replica, 1.5)
    with pytest.raises(ThinwireError, match=r"thinwire.EMA\(replica, decay\) in place of AveragedModel\(replica\)"):
        AveragedModel(replica)
