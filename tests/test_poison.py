"""Groups whose values are not finite, or came much too far: found before an average, stopped or left out."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
import small
import thinwire
from thinwire import AB, ConfigError, DiLoCo, LocalSGD

BAD = 1
"""The group that is poisoned, of three."""
STREAM = {"every": 4, "fragments": 2, "overlap": 1}
KINDS: dict[str, Any] = {
    "values": LocalSGD(every=4),
    "average": LocalSGD(every=4, moments="average"),
    "outer": DiLoCo(every=4, wire="int4"),
    "lowrank": LocalSGD(every=4, wire="lowrank:2"),
    "sparse": LocalSGD(every=4, wire="topk:0.1"),
    "streaming": DiLoCo(**STREAM, wire="int8"),
    "streaming exactly": LocalSGD(**STREAM),
    "ab": AB(total_steps=20, warmup=2, every=3, factor_at=11, redecompose=2, cutoff=0.6, warmup_wire="fp32"),
    "ab, weighted": AB(total_steps=20, warmup=0, every=4, factor_at=8, cutoff=0.6, merge="weighted", moments="average"),
    "ab, split": AB(total_steps=20, warmup=0, every=3, factor_at=3, cutoff=0.6, train="split", wire="fp32", outer=None),
}
STEPS = 16


def changed(config: Any, **fields: Any) -> Any:
    return dataclasses.replace(config, **fields)


def poison(model: nn.Module, how: str) -> str:
    """Break this worker's model; the name of what is broken."""
    name, p = list(model.named_parameters())[-2]
    with torch.no_grad():
        if how == "far":
            for each in model.parameters():
                each.add_(torch.full_like(each, 3.0))
        elif how == "statistics":
            model.norm.running_var[0] = math.inf  # type: ignore[union-attr,index]
            return "norm.running_var"
        else:
            p.view(-1)[0] = {"nan": math.nan, "inf": -math.inf}[how]
    return name


def train(rank: int, config: Any, at: dict[int, str], bad: tuple[int, ...] = (BAD,)) -> dict[str, Any]:
    """Train, and break one group right before the given steps end."""
    model = small.net(smooth=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = thinwire.attach(model, optimizer, config)
    names: list[str] = []
    try:
        for number in range(1, STEPS + 1):
            x, y = small.batch(rank, number)
            loss = F.cross_entropy(replica(x), y)
            optimizer.zero_grad()
            loss.backward()
            replica.observe(loss.detach() if loss.isfinite() else 0.0)
            if number in at and rank in bad:
                names.append(poison(model, at[number]))
            optimizer.step()
        healthy = all(bool(t.isfinite().all()) for t in (*model.parameters(), *model.buffers()))
        moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        sound = all(bool(v.isfinite().all()) for v in moments)
        replica.finish()
        bits = small.model_bits(replica.module)
        finite = all(bool(t.isfinite().all()) for t in replica.module.parameters())
    except thinwire.ThinwireError as error:
        return {"error": f"{type(error).__name__}: {error}", "names": names, "events": replica.events}
    return {
        "bits": bits,
        "finite": finite and healthy and sound,
        "events": replica.describe()["events"],
    }


def all_kinds(rank: int, kinds: list[str]) -> list[Any]:
    """Each kind: healthy with and without the policy, and poisoned."""
    found = []
    for kind in kinds:
        config = changed(KINDS[kind], group_size=1)
        leaves = changed(config, diverged="leave_out")
        at = 13 if "ab" in kind else 6
        found.append([train(rank, config, {}), train(rank, leaves, {}), train(rank, leaves, {at: "nan"})])
    return found


def check_kinds(kinds: list[str]) -> None:
    by_rank = gang.run(all_kinds, 3, kinds)
    for i, kind in enumerate(kinds):
        for plain, leaves, poisoned in (worker[i] for worker in by_rank):
            assert "error" not in poisoned, (kind, poisoned)
            assert plain["finite"] and poisoned["finite"], kind
            if kind not in ("streaming exactly", "ab, split"):  # there changes are averaged, and not values
                assert leaves["bits"] == plain["bits"] and not leaves["events"], f"{kind}: a healthy run is as before"
            said = [(e["event"], e["group"], e["rank"]) for e in poisoned["events"]]
            again = "streaming" in kind  # when it was sent, and when it came back
            assert said == [("left out", BAD, BAD)] * (1 + again), (kind, said)
        assert len({worker[i][2]["bits"] for worker in by_rank}) == 1, f"{kind}: one model at the end"
        assert by_rank[0][i][2]["bits"] != by_rank[0][i][0]["bits"]


def test_a_group_with_nan_is_left_out_and_takes_the_result_of_the_others() -> None:
    check_kinds(["values", "ab"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("values", "ab")])
def test_a_group_is_left_out_in_every_code_and_schedule(kind: str) -> None:
    check_kinds([kind])


def several(rank: int) -> dict[str, Any]:
    local = LocalSGD(every=4, group_size=1)
    leaves, diloco = changed(local, diverged="leave_out"), DiLoCo(every=4, wire="int8", group_size=1)
    return {
        "stop": train(rank, local, {6: "inf"}),
        "all": train(rank, leaves, {6: "nan"}, bad=(0, 1, 2)),
        "statistics": train(rank, leaves, {6: "statistics"}),
        "two of three": train(rank, leaves, {6: "nan", 11: "inf"}, bad=(0, 2)),
        "not an outlier": train(rank, changed(local, outliers="clip"), {}),
        "clip": train(rank, changed(diloco, outliers="clip"), {6: "far"}),
        "leave_out": train(rank, changed(diloco, outliers="leave_out"), {6: "far"}),
        "both": train(rank, changed(diloco, outliers="leave_out", diverged="leave_out"), {6: "nan"}),
    }


def test_groups_are_stopped_left_out_or_clipped() -> None:
    by_rank = gang.run(several, 3)
    for rank, found in enumerate(by_rank):
        stop = found["stop"]["error"]
        assert stop.startswith("DivergedError: group 1 (ranks 1 to 1) has parameter 'stem.weight' that is not finite")
        assert "at step 8, first on rank 1" in stop and "lower the learning rate or go back to a checkpoint" in stop
        assert "(and 2 more groups)" in found["all"]["error"] and "no group is left" in found["all"]["error"]
        (event,) = found["statistics"]["events"]
        assert event["why"] == "a running statistic 'norm.running_var'" and event["step"] == 8
        assert [(e["group"], e["step"]) for e in found["two of three"]["events"]] == [(0, 8), (2, 8), (0, 12), (2, 12)]
        assert not found["not an outlier"]["events"]
        for name, done in (("clip", "clipped"), ("leave_out", "left out")):
            (event,) = found[name]["events"]
            assert event["event"] == done and event["group"] == BAD and event["norm"] > 5 * event["median"] > 0, rank
        assert [e["why"] for e in found["both"]["events"]] == ["parameter 'stem.weight'"]
    for name in by_rank[0]:
        if "bits" in by_rank[0][name]:
            assert all(found[name]["finite"] for found in by_rank), name
            assert len({found[name]["bits"] for found in by_rank}) == 1, name


def clip_to_median(rank: int) -> Any:
    """Groups move by gradients made up here, group 2 a hundred times as far."""
    model = nn.Linear(4, 4)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    model.bias.requires_grad_(False)
    config = LocalSGD(every=1, group_size=1, outliers="clip", outlier_limit=3)
    replica = thinwire.attach(model, optimizer, config)
    replica(torch.ones(1, 4)).sum().backward()
    model.weight.grad = -torch.full((4, 4), (1.0, 2.0, 100.0)[rank])
    optimizer.step()
    return model.weight.tolist(), replica.events


def test_a_clipped_change_is_as_long_as_the_median_of_the_others() -> None:
    for weight, events in gang.run(clip_to_median, 3):
        assert torch.allclose(torch.tensor(weight), torch.full((4, 4), (1.0 + 2.0 + 1.5) / 3))
        assert [(e["group"], e["event"], e["norm"], e["median"]) for e in events] == [(2, "clipped", 400.0, 6.0)]


def pair_and_one(rank: int, at: dict[int, str]) -> Any:
    return train(rank, LocalSGD(every=4, group_size=2, diverged="leave_out"), at, bad=(0, 1))


def resumed(rank: int, folder: Path) -> list[Any]:
    """The events before a save, and those after it was loaded."""
    found = []
    for number in range(2):
        model = small.net(smooth=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        replica = thinwire.attach(model, optimizer, LocalSGD(every=2, diverged="leave_out"))
        if number:
            replica.load(folder)
        else:
            x, y = small.batch(rank, 0)
            for _ in range(2):
                F.cross_entropy(replica(x), y).backward()
                if rank:
                    poison(model, "nan")
                optimizer.step()
            replica.save(folder)
        found.append(replica.describe()["events"])
        replica.detach()
    return found


def test_events_are_known_after_a_resume(tmp_path: Path) -> None:
    for before, after in gang.run(resumed, 2, tmp_path / "save"):
        assert before == after
        assert [(event["step"], event["group"]) for event in after] == [(2, 1)]


def too_few_groups(rank: int) -> str:
    model = small.mlp()
    with pytest.raises(ConfigError) as caught:
        thinwire.attach(model, small.sgd(model), LocalSGD(every=4, outliers="clip"))
    return str(caught.value)


@pytest.mark.slow
def test_a_group_of_two_is_left_out_whole() -> None:
    by_rank = gang.run(pair_and_one, 3, {6: "nan"})
    assert len({found["bits"] for found in by_rank}) == 1 and all(found["finite"] for found in by_rank)
    assert all([(e["group"], e["rank"]) for e in found["events"]] == [(0, 0)] for found in by_rank)


def test_settings_are_refused_that_cannot_be_meant() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "`diverged`='ignore' is not known, choose from: stop, leave_out": {"diverged": "ignore"},
        "`outliers`=True is not known, choose from: keep, clip, leave_out": {"outliers": True},
        "`outlier_limit`=1 must be a number above 1": {"outlier_limit": 1},
        "diverged='leave_out' cannot take a group out of what rows='seen' shares": {
            "diverged": "leave_out",
            "rows": "seen",
        },
        "outliers='clip' cannot take a group out of what second_moment='shared'": {
            "outliers": "clip",
            "second_moment": "shared",
        },
        "outliers='leave_out' is for averages that are waited for, not for `overlap`=1": {
            "outliers": "leave_out",
            "overlap": 1,
        },
    }
    for message, fields in wrong.items():
        with pytest.raises(ConfigError) as caught:
            LocalSGD(every=4, **fields)
        assert message in str(caught.value)
    assert all("outliers='clip' needs at least 3 groups, here are 2" in said for said in gang.run(too_few_groups, 2))
