"""Optimizers of another package by every method: stopped and resumed bit for bit, or refused in one sentence."""

import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import gang
import many
import needs
import small
import thinwire
from covering import cases, gangs
from every_method import STEPS, WAYS, engine
from test_sweep import EXPECTED, agree, digest
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.exchange.parts import MethodContext
from thinwire.factor.moments import transport
from thinwire.factor.optimizers import Optimizers
from thinwire.recipes import digits, named
from thinwire.shape.factoring import RateMatching
from thinwire.train.task import describe_optimizer


@pytest.fixture(scope="module", autouse=True)
def others() -> Any:
    """The package; importing it takes seconds, in every process that collects tests."""
    return needs.package("pytorch_optimizer")


def other(kind: str) -> Any:
    """One of its optimizers."""
    return getattr(needs.package("pytorch_optimizer"), kind)


def _of(kind: str, **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: other(kind)(model.parameters(), **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "lars": _of("LARS", lr=0.5, weight_decay=1e-3),
    "lamb": _of("Lamb", lr=1e-2, weight_decay=1e-2),
    "lion": _of("Lion", lr=1e-3),
    "schedule-free": _of("ScheduleFreeAdamW", lr=1e-3),
    "soap": _of("SOAP", lr=1e-3, precondition_frequency=3),
    "shampoo": _of("Shampoo", lr=1e-2, momentum=0.9),
    "8 bits": _of("FlashAdamW", lr=1e-3),
    "sam": lambda model: other("SAM")(model.parameters(), SGD, lr=0.05, momentum=0.9),
}
STOP = 10
BY = [
    way
    for way in WAYS
    if way not in ("allreduce bf16", "allreduce int8", "ab both", "diloco streaming", "ab-paper average")
]
AVERAGED = ("ab split", "ab-paper carry", "localsgd average")
"""Those that average the optimizer's state."""
EXACT = ("allreduce", "powersgd", "topk", "onebit")
"""Those that leave parameters to the optimizer."""


def refusal(kind: str, way: str) -> str | None:
    """What is said where an optimizer does not go with a method."""
    if kind == "schedule-free" and way not in EXACT:
        return "evaluates other weights than it trains"
    return "over groups means nothing" if kind in ("soap", "8 bits") and way in AVERAGED else None


def step(replica: Any, optimizer: Any, rank: int, number: int, *, closure: bool = False) -> None:
    """One step; of two passes with SAM, in either of its two forms."""
    x, y = small.batch(rank, number)

    def passes() -> None:
        optimizer.zero_grad()
        F.cross_entropy(replica(x), y).backward()

    passes()
    if not isinstance(optimizer, other("SAM")):
        optimizer.step()
    elif closure:
        optimizer.step(passes)
    else:
        optimizer.first_step(zero_grad=True)
        passes()
        optimizer.second_step(zero_grad=True)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All values in some state, lists too, in a fixed order."""
    if isinstance(value, dict):
        return [t for _, part in sorted(value.items()) for t in tensors_in(part)]
    if isinstance(value, list | tuple):
        return [t for part in value for t in tensors_in(part)]
    return [] if value is None or isinstance(value, str) else [torch.as_tensor(value)]


def look(replica: Any, optimizer: Any) -> dict[str, Any]:
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    return {
        "phase": replica.phase,
        "spans world": replica.in_sync,
        "parameters": digest(replica.parameters()),
        "buffers": digest(replica.buffers()),
        "optimizer": digest(t for state in states for t in tensors_in(dict(state))),
    }


def advance(replica: Any, optimizer: Any, rank: int, end: int) -> list[dict[str, Any]]:
    seen = []
    for number in range(replica.step, end):
        step(replica, optimizer, rank, number, closure=bool(number % 2))
        seen.append(look(replica, optimizer))
    return seen


def stop_and_resume(rank: int, kind: str, way: str, folder: str) -> dict[str, Any]:
    """An unbroken run that saves, then a fresh replica from its save."""
    found: dict[str, Any] = {}
    for seed, name in ((0, "steps"), (7, "resumed")):
        model = small.net(seed)
        optimizer = OPTIMIZERS[kind](model)
        try:
            replica = thinwire.attach(model, optimizer, WAYS[way].config())
            if name == "steps":
                seen = advance(replica, optimizer, rank, STOP)
                replica.save(folder)
            else:
                replica.load(folder)
                seen = []
        except ConfigError as error:
            return {"refused": str(error), "step": optimizer.param_groups[0].get("step", 0)}
        found[name] = seen + advance(replica, optimizer, rank, STEPS)
        found["sent"] = replica.traffic.slow_bytes
        found[f"finished {name}"] = small.model_bits(replica.finish())
    found["finished"] = found["finished steps"]
    return found


MATRIX = [{"kind": kind, "way": way, "engine": engine(way)} for kind in OPTIMIZERS for way in BY]
KEYS = [(str(case["kind"]), str(case["way"])) for case in cases(MATRIX, [("kind", "way")])]
GANGS = gangs(KEYS, lambda key: 2)


@functools.cache
def swept(keys: tuple[tuple[str, str], ...]) -> list[dict[str, many.Outcome]]:
    with tempfile.TemporaryDirectory() as folder:
        due = {f"{key}": (*key, f"{folder}/{'-'.join(key)}") for key in keys}
        return many.run(stop_and_resume, 2, due, Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), [pytest.param(*key, id="-".join(key)) for key in KEYS])
def test_resuming_equals_never_having_stopped_or_it_is_refused(kind: str, way: str) -> None:
    key = (kind, way)
    found = many.values([worker[f"{key}"] for worker in swept(GANGS[key])], EXPECTED)
    if said := refusal(kind, way):
        assert all(said in worker["refused"] and worker["step"] <= 1 for worker in found)
        return
    agree(way, found)
    for worker in found:
        assert worker["steps"][STOP:] == worker["resumed"]
        assert worker["finished steps"] == worker["finished resumed"]


# SAM.


@pytest.mark.parametrize("closure", [False, True])
def test_sam_trains_as_without_thinwire(closure: bool) -> None:
    ends = []
    for attached in (False, True):
        model = small.mlp()
        sam = OPTIMIZERS["sam"](model)
        replica: Any = thinwire.attach(model, sam, thinwire.AllReduce()) if attached else model
        for number in range(6):
            step(replica, sam, 0, number, closure=closure)
        ends.append(small.model_bits(model))
    assert ends[0] == ends[1]
    assert replica.step == 6


def two_passes(rank: int) -> dict[str, Any]:
    """SAM on two workers, whose two halves are one batch; then with the first pass of each worker its own."""
    found: dict[str, Any] = {}
    for name in ("together", "own"):
        model = small.mlp(smooth=True)
        sam = OPTIMIZERS["sam"](model)
        replica = thinwire.attach(model, sam, thinwire.AllReduce())
        for number in range(4):
            x, y = small.batch(rank, number)
            sam.zero_grad()
            if name == "own":
                with replica.no_sync():
                    F.cross_entropy(replica(x), y).backward()
            else:
                F.cross_entropy(replica(x), y).backward()
            sam.first_step(zero_grad=True)
            F.cross_entropy(replica(x), y).backward()
            sam.second_step(zero_grad=True)
        found[name] = [p.detach().clone() for p in model.parameters()], replica.traffic.slow_bytes, replica.step
        replica.finish()
    return found


@pytest.mark.slow
def test_sam_on_two_workers_is_sam_on_the_whole_batch() -> None:
    here, there = gang.run(two_passes, 2)
    model = small.mlp(smooth=True)
    sam = OPTIMIZERS["sam"](model)
    for number in range(4):
        x, y = (torch.cat(parts) for parts in zip(*(small.batch(rank, number) for rank in (0, 1)), strict=True))
        for move in (sam.first_step, sam.second_step):
            F.cross_entropy(model(x), y).backward()
            move(zero_grad=True)
    for name in ("together", "own"):
        assert small.bits(*here[name][0]) == small.bits(*there[name][0])
        assert here[name][2] == 4
    for ours, theirs in zip(here["together"][0], model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert here["own"][1] < 0.6 * here["together"][1]


# Schedule-Free.


def test_schedule_free_evaluates_its_average_and_trains_on_as_if_nothing_had_happened() -> None:
    ends = []
    for attached in (False, True):
        model = small.mlp()
        optimizer = OPTIMIZERS["schedule-free"](model)
        replica: Any = thinwire.attach(model, optimizer, thinwire.AllReduce()) if attached else model
        for number in range(6):
            step(replica, optimizer, 0, number)
            if attached:
                trained = small.model_bits(model)
                with replica.merged():
                    assert not optimizer.param_groups[0]["train_mode"]
                    assert small.model_bits(model) != trained or number == 0
                assert small.model_bits(model) == trained and optimizer.param_groups[0]["train_mode"]
        if not attached:
            optimizer.eval()
        ends.append(small.model_bits(replica.finish() if attached else model))
    assert ends[0] == ends[1]


def test_nothing_is_trained_on_the_weights_that_schedule_free_evaluates() -> None:
    model = small.mlp()
    optimizer = OPTIMIZERS["schedule-free"](model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    step(replica, optimizer, 0, 0)
    optimizer.eval()
    with pytest.raises(ThinwireError, match=r"call optimizer.train\(\) on all workers"):
        step(replica, optimizer, 0, 1)


# What is refused, and what state means.


@pytest.mark.parametrize(
    "config", [thinwire.AB(total_steps=100), thinwire.LocalSGD(every=4), thinwire.OIALR(total_steps=100), small.ab()]
)
def test_schedule_free_is_refused_where_parameters_are_averaged_or_factored(config: Any) -> None:
    model = small.mlp()
    with pytest.raises(ConfigError, match=r"ScheduleFreeAdamW cannot be attached with .*use AllReduce"):
        thinwire.attach(model, OPTIMIZERS["schedule-free"](model), config)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: other("Lookahead")(SGD(p, lr=0.1)), "Lookahead cannot be attached.*use SGD alone"),
        (lambda p: other("LookSAM")(p, SGD, lr=0.1), "LookSAM cannot be attached.*or SAM around it"),
        (lambda p: other("ScalableShampoo")(p), "ScalableShampoo cannot be attached.*'pre_conditioner'"),
    ],
)
def test_state_that_no_save_can_hold_is_refused_in_the_first_step(make: Callable[..., Any], said: str) -> None:
    model = small.mlp()
    with pytest.raises(ConfigError, match=said):
        optimizer = make(model.parameters())
        step(thinwire.attach(model, optimizer, thinwire.AllReduce()), optimizer, 0, 0)


def average_state(rank: int) -> list[Any]:
    config = thinwire.LocalSGD(every=2, moments="average")
    model = small.mlp()
    lamb = OPTIMIZERS["lamb"](model)
    replica = thinwire.attach(model, lamb, config)
    for number in range(2):
        step(replica, lamb, rank, number)
    state = lamb.state[model[1].weight]
    said = []
    for kind in ("soap", "8 bits"):
        with pytest.raises(ConfigError) as caught:
            model = small.mlp()
            optimizer = OPTIMIZERS[kind](model)
            step(thinwire.attach(model, optimizer, config), optimizer, rank, 0)
        said.append(str(caught.value))
    return [state["exp_avg"], float(state["trust_ratio"]), *said]


@pytest.mark.slow
def test_lambs_state_is_averaged_and_bases_and_codes_are_not() -> None:
    here, there = gang.run(average_state, 2)
    assert torch.equal(here[0], there[0]) and here[0].any()
    assert here[1] == there[1] > 0
    assert "`moments`='average' cannot be used with SOAP" in here[2] and "FlashAdamW" in here[3]


def test_lists_of_matrices_do_not_follow_a_change_of_shape() -> None:
    state = {"exp_avg": torch.ones(2, 2), "GG": [torch.ones(2, 2), []], "Q": None}
    with pytest.warns(UserWarning, match="'GG' is not known to follow"):
        assert transport(state, lambda moment, power: moment) == {}


def test_steps_counted_by_a_group_start_again_with_all_of_its_state() -> None:
    model = small.mlp()
    optimizer = OPTIMIZERS["lamb"](model)
    step(model, optimizer, 0, 0)
    first, *rest = model.parameters()
    for parameters, counted in (([first], 1), (rest, 0)):
        Optimizers(optimizer).reset(parameters)
        assert optimizer.param_groups[0]["step"] == counted


@pytest.mark.parametrize(
    ("kind", "is_normalised"), [("lion", True), ("8 bits", True), ("lamb", False), ("lars", False)]
)
def test_rates_are_matched_where_updates_have_one_size_per_element(kind: str, is_normalised: bool) -> None:
    model = small.mlp()
    optimizer = OPTIMIZERS[kind](model)
    step(model, optimizer, 0, 0)
    rates = RateMatching(MethodContext(model, Optimizers(optimizer), wire=None), list)  # type: ignore[arg-type]
    assert rates.is_normalised(next(model.parameters())) == is_normalised


# By name.


def test_a_recipe_takes_an_optimizer_by_name() -> None:
    known = describe_optimizer(named("digits", optimizer="lamb", lr=0.02).suited_to("ab").optimizer)
    assert (known["optimizer"], known["optimizer.lr"]) == ("Lamb", 0.02)
    assert named("digits", optimizer="schedulefree").rate.factor(500, 600, 30) == 1.0
    assert named("digits", optimizer="soap").rate == digits().rate
    with pytest.raises(ConfigError, match=r"unknown optimizer 'adamax', choose from: adamw, adamw8bit, lamb"):
        named("digits", optimizer="adamax")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigError, match=r"`--optimizer lamb` needs .*pip install 'thinwire\[optimizers\]'"):
        named("digits", optimizer="lamb")
    assert describe_optimizer(named("digits", optimizer="sgd").optimizer)["optimizer"] == "SGD"


def test_sam_keeps_no_state_of_weights_that_became_factors() -> None:
    model = small.mlp()
    sam = OPTIMIZERS["sam"](model)
    sam.state = defaultdict(dict)  # of its own, as SAMs of other packages have it
    config = thinwire.AB(total_steps=60, warmup=2, every=3, factor_at=4, cutoff=0.6)
    replica = thinwire.attach(model, sam, config)
    for number in range(9):
        for p in model.parameters() if number < 2 else ():
            sam.state[p]["old_p"] = p.detach().clone()
        step(replica, sam, 0, number)
    assert replica.phase == "factored"
    own = {id(p) for p in model.parameters()}
    assert sam.state and all(id(p) in own for p in sam.state)
