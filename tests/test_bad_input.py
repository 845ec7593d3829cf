"""Bad input, each with a message that a stranger understands: what was given, what is allowed, what to do."""

import logging
import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gang
import small
import thinwire
from thinwire import AllReduce, ConfigError, DisagreementError, DivergedError, ThinwireError
from thinwire.comm.topology import place
from thinwire.methods import PaperAB
from thinwire.recipes import named
from thinwire.train import fit
from thinwire.train.data import Images, digits


def says(message: str, *parts: str) -> bool:
    return all(part in message for part in parts)


# Configs.

STEP_FIELDS = [
    (field, value)
    for field in ("warmup", "every", "rebound", "lr_rebound")
    for value in (-0.1, 1.5, math.nan, math.inf, "0.2", None, True)
]


@pytest.mark.parametrize(("field", "value"), [*STEP_FIELDS, ("every", 0)])
def test_lengths_are_fractions_or_whole_steps(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=100, **{field: value})
    assert says(str(caught.value), f"`{field}`={value!r}", "a fraction", "below 1", "a whole number of steps")


@pytest.mark.parametrize("value", [0, -5, 1e4, "100", None, True])
def test_total_steps_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=value)
    assert says(str(caught.value), f"`total_steps`={value!r}", "whole number from 1 on")


@pytest.mark.parametrize("total_steps", [1, 10, 15])
def test_too_few_steps_for_one_cycle_say_how_many_fit(total_steps: int) -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=total_steps)
    message = str(caught.value)
    assert says(message, f"`total_steps`={total_steps} is too small for one cycle", "`every`=0.0333")
    least = int(re.search(r"at least (\d+)", message)[1])  # type: ignore[index]
    assert PaperAB(total_steps=least).group_length == 1
    with pytest.raises(ConfigError):
        PaperAB(total_steps=least - 1)


def test_a_warm_up_that_leaves_no_room_says_what_it_takes() -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=100, warmup=98)
    assert says(str(caught.value), "warm-up takes 98", "a group phase 3", "together 101", "at most 97 steps fits")
    assert PaperAB(total_steps=101, warmup=98).warmup_length == 98


@pytest.mark.parametrize("cutoff", [0, 1, -0.1, 1.5, math.nan, "0.15", None])
def test_cutoff_lies_between_0_and_1(cutoff: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=100, cutoff=cutoff)
    assert says(str(caught.value), f"`cutoff`={cutoff!r}", "between 0 and 1", "try 0.15")


CHOICES = [
    (PaperAB, "merge", "mean, trained, weighted"),
    (PaperAB, "moments", "reset, average, carry"),
    (PaperAB, "wire", "fp32, bf16"),
    (PaperAB, "warmup_wire", "fp32, bf16"),
    (AllReduce, "wire", "fp32, bf16"),
]


@pytest.mark.parametrize(("config", "field", "known"), CHOICES)
@pytest.mark.parametrize("value", ["mode", 3, None, ["mean"]])
def test_choices_list_what_there_is(config: Any, field: str, known: str, value: Any) -> None:
    needed = {"total_steps": 100} if config is PaperAB else {}
    with pytest.raises(ConfigError) as caught:
        config(**needed, **{field: value})
    what = "a code for the wire" if "wire" in field else "known"
    assert says(str(caught.value), f"`{field}`={value!r} is not {what}", "choose from", known)


@pytest.mark.parametrize("config", [lambda **f: PaperAB(total_steps=100, **f), AllReduce])
@pytest.mark.parametrize("value", [0, -1, 1.5, "node", True, [2]])
def test_group_sizes_are_whole_or_the_world(config: Any, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config(group_size=value)
    assert says(str(caught.value), f"`group_size`={value!r}", "whole number", '"world"', "None")


@pytest.mark.parametrize("value", ["fc*", 5, ("fc", 5), None])
def test_keep_is_a_tuple_of_patterns(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=100, keep=value)
    assert says(str(caught.value), f"`keep`={value!r}", "tuple of patterns", "keep=(")


@pytest.mark.parametrize("field", ["keep_first", "keep_last"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        PaperAB(total_steps=100, **{field: value})
    assert says(str(caught.value), f"`{field}`={value!r}", "True or False")


AB_REFUSES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "factors in the warm-up": (
        {"warmup": 20, "factor_at": 10},
        ("`factor_at`=10 is step 10, before the warm-up ends at step 20", "use factor_at=20"),
    ),
    "as a share": ({"warmup": 0.2, "factor_at": 0.1}, ("`factor_at`=0.1 is step 10", "use factor_at=20")),
    "factors beyond the end": ({"factor_at": 150}, ("`factor_at`=150 is step 150", "use at most 76, or None")),
    "factors at the end": ({"factor_at": 100}, ("`total_steps`=100", "use at most 76, or None")),
    "factors for less than a round": (
        {"every": 24, "factor_at": 77},
        ("less than `every`=24", "use at most 76, or None"),
    ),
    "negative": ({"factor_at": -1}, ("`factor_at`=-1", "a fraction from 0 to below 1, or a whole number of steps")),
    "half a step": ({"factor_at": 5.5}, ("`factor_at`=5.5", "a whole number of steps")),
    "not a number": ({"factor_at": "late"}, ("`factor_at`='late'", "a whole number of steps")),
    "a switch": ({"factor_at": True}, ("`factor_at`=True", "a whole number of steps")),
    "rounds too long": ({"every": 96}, ("`every`=96", "`total_steps`=100", "use every=95 or less")),
    "all warm-up": ({"warmup": 100}, ("`warmup`=100", "shorten the warm-up")),
    "no rounds": ({"every": 0}, ("`every`=0 must be a whole number from 1 on",)),
    "shorter than short": ({"every_max": 5}, ("`every_max`=5 must be a whole number from 24 on",)),
    "never cut": ({"redecompose": 0}, ("`redecompose`=0 must be a whole number from 1 on",)),
    "half a cut": ({"redecompose": 1.5}, ("`redecompose`=1.5 must be a whole number",)),
    "a target of 1": ({"target": 1}, ("`target`=1 must be above 1", "try 5")),
    "a target below": ({"target": 0.2}, ("`target`=0.2 must be above 1", "try 5")),
    "no number as a target": ({"target": math.nan}, ("`target`=nan must be above 1",)),
    "an unknown side": ({"train": "A"}, ("`train`='A' is not known, choose from: alternate, split, both",)),
    "merge": ({"merge": "trained"}, ("`merge`='trained'", "choose from: mean, weighted")),
    "moments": ({"moments": "reset"}, ("`moments`='reset'", "choose from: keep, average")),
    "outer": ({"outer": 0.5}, ("`outer`=0.5 must be None", "thinwire.Radial()")),
    "overlap": ({"overlap": 24}, ("`overlap`=24 must be below `every`=24",)),
    "offload": ({"offload": "cpu"}, ("`offload`='cpu' must be True or False",)),
    "total": ({"total_steps": 0}, ("`total_steps`=0 must be a whole number from 1 on",)),
    "cutoff": ({"cutoff": 1}, ("`cutoff`=1 must be between 0 and 1",)),
}


@pytest.mark.parametrize("what", AB_REFUSES)
def test_ab_says_what_it_was_given_and_what_to_do(what: str) -> None:
    fields, parts = AB_REFUSES[what]
    with pytest.raises((ConfigError, TypeError)) as caught:
        thinwire.AB(**{"total_steps": 100, **fields})
    message = str(caught.value)
    assert says(message, *parts), message
    assert "\n" not in message and not message.endswith("."), "one sentence"


class Turned(nn.Module):
    """A network whose outputs are multiplied by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.phase = small.mlp(), nn.Parameter(torch.zeros(10, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return x + (x * self.phase).real + self.phase.imag


def carries_complex(rank: int) -> list[str]:
    """By code of the warm-up; those of averages carry both parts as numbers."""
    found = []
    for code in ("lowrank:2", "int8", "fp32"):
        model = Turned()
        optimizer = small.sgd(model)
        config = thinwire.AB(total_steps=20, warmup=2, every=3, warmup_wire=code, group_size=1, cutoff=0.6)
        try:
            replica = thinwire.attach(model, optimizer, config)
            for _ in small.walk(replica, optimizer, rank, 6):
                pass
            assert model.phase.abs().sum() > 0
            found.append("")
        except ThinwireError as error:
            found.append(str(error))
    return found


def test_a_code_that_cannot_carry_complex_numbers_is_refused_at_once() -> None:
    for messages in gang.run(carries_complex, 2):
        for code, message in zip(("lowrank:2", "int8"), messages, strict=False):
            assert says(message, f"'{code}' cannot carry", "complex parameter 'phase'", "use 'fp32' or 'bf16'")
        assert not messages[2], messages[2]


def test_configs_are_frozen_and_by_keyword() -> None:
    with pytest.raises(TypeError):
        PaperAB(100)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        PaperAB(total_steps=100).cutoff = 0.2  # type: ignore[misc]


# Attaching.


def attach(config: Any, model: nn.Module | None = None, **more: Any) -> Any:
    model = model or small.mlp()
    return thinwire.attach(model, small.sgd(model), config, **more)


@pytest.mark.parametrize("given", ["ab-paper", PaperAB, None, {"total_steps": 100}])
def test_something_that_is_no_config_lists_the_configs(given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        attach(given)
    assert says(str(caught.value), "is not the config of a method", "AllReduce", "PaperAB")


def test_a_model_with_nothing_to_factor_says_why() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    with pytest.raises(ConfigError) as caught:
        attach(small.ab(), model)
    assert says(
        str(caught.value),
        "nothing to factor",
        "1.weight (first layer)",
        "3.weight (last layer)",
        "keep_first=False",
    )
    assert attach(small.ab(keep_first=False), model).phase == "warmup"
    for layers, remedy in (
        ([nn.Linear(64, 16)], "of one layer may want `keep_first=False` and `keep_last=False`"),
        ([nn.Linear(64, 16), nn.Linear(16, 1)], "a small model may want `keep_first=False`"),
        ([nn.Embedding(9, 8)], "train it by a method that factors nothing"),
    ):
        with pytest.raises(ConfigError) as caught:
            attach(small.ab(), nn.Sequential(*layers))
        assert str(caught.value).endswith(remedy)
    with pytest.raises(ConfigError, match="it has no weight matrices"):
        attach(small.ab(), nn.Sequential(nn.BatchNorm1d(4)))


def test_an_optimizer_of_another_model() -> None:
    for config in (small.ab(), AllReduce()):
        with pytest.raises(ConfigError) as caught:
            thinwire.attach(small.mlp(), small.sgd(small.mlp()), config)
        assert says(
            str(caught.value),
            "SGD, 8 parameters",
            "none of the model's parameters",
            "this model's parameters()",
        )


def test_ddp_options_that_are_taken() -> None:
    with pytest.raises(ConfigError) as caught:
        attach(AllReduce(), ddp={"process_group": None, "init_sync": True, "bucket_cap_mb": 5})
    assert says(str(caught.value), "init_sync, process_group", "leave them out")
    assert "bucket_cap_mb" not in str(caught.value)


def test_a_pattern_that_matches_nothing_warns_once() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replica = thinwire.attach(model, optimizer, small.ab(keep=("fc*", "3*", "3", "5.weight_a")))
        for _ in small.walk(replica, optimizer, 0):
            pass
        replica.finish()
    told = sorted(str(w.message) for w in caught)
    assert len(told) == 2
    assert says(told[0], "keep pattern '5.weight_a' matches no layer", "there are 1, 3, 5, 7")
    assert says(told[1], "keep pattern 'fc*' matches no layer")


def test_a_finished_replica_says_so() -> None:
    replica = attach(AllReduce())
    with pytest.raises(ConfigError, match=r"`cutoff`=1.5 must be in \[0, 1\)"):
        replica.finish(1.5)
    replica.finish()
    assert replica.phase == "finished"
    for call, said in ((replica.finish, "has run already"), (lambda: replica.save("x"), "after finish")):
        with pytest.raises(thinwire.ThinwireError, match=said):
            call()


def test_loading_from_nowhere_or_another_config_says_so(tmp_path: Any) -> None:
    replica = attach(small.ab())
    with pytest.raises(ConfigError, match=r"there is no saved folder at '.*nowhere'"):
        replica.load(tmp_path / "nowhere")
    replica.save(tmp_path / "save")
    with pytest.raises(ConfigError, match=r"another config: cutoff=0.6 there, 0.3 here"):
        attach(small.ab(cutoff=0.3)).load(tmp_path / "save")
    with pytest.raises(ConfigError, match="of method 'ab-paper', attached is 'allreduce'"):
        attach(AllReduce()).load(tmp_path / "save")


# Workers that differ.


def differ(rank: int, folder: str) -> dict[str, str]:
    found = {}
    for what in ("one more", "one less", "others", "targets", "fingerprint"):
        source = odd_data(what, rank == 2)
        recipe = named("digits").replace(source=lambda _, source=source: source)
        with pytest.raises(DisagreementError) as caught:
            fit(recipe, AllReduce(), out=folder)
        found[what] = str(caught.value)
    for what in ("shape", "name", "dtype", "groups", "frozen", "more"):
        model, optimizer = odd_one(what if rank == 2 else "none")
        with pytest.raises(DisagreementError) as caught:
            thinwire.attach(model, optimizer, small.ab())
        found[what] = str(caught.value)
    return found


def odd_one(what: str) -> tuple[nn.Module, Any]:
    model: Any = small.net()
    if what == "shape":
        model.middle = nn.Linear(32, 32, bias=False)
        model.head = nn.Linear(32, 11)
    if what == "name":
        model.other = model.head
        del model.head
    if what == "dtype":
        model.middle.bfloat16()
    if what == "frozen":
        model.middle.requires_grad_(False)
    if what == "more":
        model.extra = nn.Linear(4, 4)
    groups = [{"params": [p]} for p in model.parameters()] if what == "groups" else model.parameters()
    return model, torch.optim.SGD(groups, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Printed(Images):
    """Examples that nobody looks at, as they have a fingerprint."""

    told: str

    def fingerprint(self) -> str:
        return self.told


def odd_data(what: str, odd: bool) -> Images:
    source = digits()
    if what == "fingerprint":
        return Printed(**vars(replace(source, y=9 - source.y if odd else source.y)), told="odd" if odd else "even")
    changes = {
        "one more": {"train_rows": np.append(source.train_rows, 0)},
        "one less": {"heldout_rows": source.heldout_rows[1:]},
        "others": {"train_rows": np.roll(source.train_rows, 1)},
        "targets": {"y": 9 - source.y},
    }
    return replace(source, **changes[what]) if odd else source


def test_different_architectures_and_data_name_the_ranks_and_the_place(tmp_path: Path) -> None:
    examples = "'examples 0, 628, 1256 to train on of checksum "
    data = {
        "one more": ("'1,257 examples to train on'", "'1,258 examples to train on'"),
        "one less": ("'540 examples held out'", "'539 examples held out'"),
        "others": (examples, examples),
        "targets": (examples, examples),
        "fingerprint": ("'files of fingerprint even'", "'files of fingerprint odd'"),
    }
    there = {
        "shape": ("middle.bias [32]", "head.weight [11, 32]"),
        "name": ("head.weight", "other.weight"),
        "dtype": ("torch.float32", "torch.bfloat16"),
        "groups": ("1 groups", "10 groups"),
        "frozen": ("middle.weight", "frozen"),
        "more": ("norm.running_mean", "extra.weight"),
    }
    found = gang.run(differ, 3, str(tmp_path), patience=20)
    assert found[0] == found[1] == found[2]
    for what, (here, other) in there.items():
        assert says(found[0][what], "different models", "rank 0 has", "where rank 2 has", here, other)
        assert "ranks that differ from rank 0: 2)" in found[0][what]
    for what, (here, other) in data.items():
        assert says(found[0][what], f"different data: rank 0 has {here}", f"where rank 2 has {other}")
        assert "from rank 0: 2); give every worker the same data" in found[0][what]
    assert not list(tmp_path.iterdir())


def start_apart(rank: int) -> dict[str, Any]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    logging.getLogger("thinwire").setLevel(logging.INFO)
    model, same = small.net(seed=rank), small.net()
    with torch.no_grad():
        model.norm.running_mean.fill_(rank)  # type: ignore[operator,union-attr]
    own = small.clone(model)
    replica = thinwire.attach(model, small.sgd(model), small.ab())
    alike = thinwire.attach(same, small.sgd(same), small.ab())
    return {
        "own": own,
        "now": small.clone(model),
        "sent": replica.traffic.by_purpose.get("first values"),
        "alike": alike.traffic.by_purpose.get("first values"),
        "logged": [line for line in logged if "rank 0's" in line],
    }


def test_different_first_values_become_rank_0s_and_are_counted_once() -> None:
    here, there = gang.run(start_apart, 2)
    assert not small.same(here["own"], there["own"])
    assert small.same(here["now"], here["own"]) and small.same(there["now"], here["own"])
    size = sum(t.numel() * t.element_size() for t in here["own"].values())
    assert here["sent"]["slow_bytes"] == size
    assert here["alike"] is there["alike"] is None
    assert len(here["logged"]) == 1 and there["logged"] == []


# Divergence.


def diverge(rank: int, what: str) -> str:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab(group_size=2))
    with pytest.raises(DivergedError) as caught:
        for number in small.walk(replica, optimizer, rank):
            if number == 4 and rank == 2:
                spoil(replica, what)
    return str(caught.value)


def spoil(replica: Any, what: str) -> None:
    if what == "loss":
        replica.observe(torch.tensor(math.nan))
    else:
        with torch.no_grad():
            replica.module.middle.weight_b[0, 0] = math.inf


def diverge_before_a_split(rank: int) -> str:
    """One layer alone: only one member of the group would decompose it."""
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab(group_size=2))
    with pytest.raises(DivergedError) as caught:
        for number in range(small.STEPS):
            x, y = small.batch(rank, number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(x), y).backward()
            if number == 2:
                replica.module.middle.weight.grad[0, 0] = math.nan
            optimizer.step()
    return str(caught.value)


def every_divergence(rank: int) -> list[str]:
    return [diverge(rank, "loss"), diverge(rank, "parameter"), diverge_before_a_split(rank)]


def test_a_group_that_diverged_stops_everyone_by_name() -> None:
    for loss, parameter, layer in gang.run(every_divergence, 3, patience=20):
        assert says(layer, "layer 'middle'", "not finite", "lower the learning rate")
        for message in (loss, parameter):
            assert says(
                message,
                "group 1",
                "ranks 2 to 2",
                "not finite",
                "step 7",
                "nothing was merged",
                "lower the learning rate",
            )


def other_mistakes(rank: int) -> dict[str, str]:
    found = {}
    for size in (3, 100):
        with pytest.raises(ConfigError) as caught:
            attach(small.ab(group_size=size))
        found[f"size {size}"] = str(caught.value)
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab(merge="weighted"))
    with pytest.raises(ConfigError) as caught:
        for _ in small.walk(replica, optimizer, rank):
            pass
    found["unobserved"] = str(caught.value)
    return found


def test_group_sizes_beyond_the_world_and_losses_nobody_told() -> None:
    for found in gang.run(other_mistakes, 2, patience=20):
        for size in (3, 100):
            assert says(
                found[f"size {size}"],
                f"`group_size`={size} exceeds the world of 2 workers",
                "use 1 to 2",
                '"world"',
            )
        assert says(found["unobserved"], "merge='weighted'", "replica.observe(loss)")


def test_a_single_process_is_a_world_of_one() -> None:
    with pytest.raises(ConfigError, match=r"`group_size`=2 exceeds the world of 1 worker; use 1 to 1"):
        attach(small.ab(group_size=2))


# A rank that does not come.


def stay_away(rank: int, call: str, absent: int, folder: str) -> str | None:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    for _ in small.walk(replica, optimizer, rank, 4):
        pass
    store = dist.distributed_c10d._get_default_store()
    if rank == absent:
        # Alive until the others have given up: a rank that is busy elsewhere, not one that died.
        store.wait([f"told {other}" for other in range(3) if other != absent], timedelta(seconds=60))
        return None
    with pytest.raises(DisagreementError) as caught:
        {
            "save()": lambda: replica.save(folder),
            "finish()": replica.finish,
            "merged()": replica.merged().__enter__,
        }[call]()
    store.set(f"told {rank}", "1")
    return str(caught.value)


@pytest.mark.slow
def test_collective_calls_say_who_is_missing(tmp_path: Any) -> None:
    cases = [("save()", 1), ("finish()", 2), ("merged()", 0)]
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(gang.run, stay_away, 3, *case, str(tmp_path / "save"), patience=10) for case in cases]
        for (call, absent), run in zip(cases, runs, strict=True):
            messages = [message for message in run.result() if message is not None]
            assert len(messages) == 2
            for message in messages:
                assert says(message, f"{call} is collective: every rank must call it, and rank {absent} did not")
    assert not (tmp_path / "save").exists()


def other_settings(rank: int) -> str:
    model = small.net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(DisagreementError) as caught:
        thinwire.attach(model, optimizer, small.ab(group_size=1 + rank % 2))
    return str(caught.value)


def test_workers_with_different_settings_are_refused_before_they_wait() -> None:
    for message in gang.run(other_settings, 2, patience=20):
        assert "ranks 1 differ from rank 0" in message and "group_size=" in message


# What would let workers drift apart unseen.


def trains_past_the_replica(rank: int, way: str) -> str:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, AllReduce())
    small.step(replica, optimizer, rank, 0)
    called = model if way == "bare model" else replica.eval()
    with pytest.raises(thinwire.ThinwireError) as caught:
        small.step(called, optimizer, rank, 1)
    return str(caught.value)


@pytest.mark.parametrize("way", ["bare model", "eval"])
def test_gradients_that_nobody_averaged_are_refused(way: str) -> None:
    for message in gang.run(trains_past_the_replica, 2, way):
        assert says(message, "step 2", "not averaged", "train()", "replica(x)")


def test_a_model_left_in_factors_is_not_attached_again() -> None:
    model = small.net()
    optimizer = small.sgd(model)
    thinwire.attach(model, optimizer, small.ab(warmup=0, group_size=None)).detach()
    with pytest.raises(ConfigError, match="factored layers from an earlier attach"):
        thinwire.attach(model, optimizer, AllReduce())


def test_no_hook_is_left_behind() -> None:
    for end in ("finish", "detach"):
        model = small.net()
        replica = thinwire.attach(model, small.sgd(model), small.ab(group_size=None))
        getattr(replica, end)()
        assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "4"}, None),  # a shell that salloc opened
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script
        ({"SLURM_PROCID": "0"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2, 1, 2)),
        (
            {
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_PROCID": "5",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            (5, 8, 1, 4),
        ),
    ],
)
def test_only_a_launchers_step_makes_a_worker(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: Any
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place() == found
