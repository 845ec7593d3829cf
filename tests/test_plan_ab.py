"""Plans of AB: ranks for a size, averages that become rarer, what is held, and how long a step takes."""

import gc
from typing import Any

import pytest
import torch

import gang
import thinwire
from thinwire.comm.topology import arrange
from thinwire.commands.plan import beside, caption
from thinwire.exchange.averaged import sketch
from thinwire.factor.convert import find_layers
from thinwire.plan import ranks as predicted
from thinwire.plan.compute import given
from thinwire.plan.forecast import Forecast, Layout, Links
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.simulate import Simulation, simulate
from thinwire.plan.workload import Workload, of_recipe
from thinwire.recipes import named
from worlds import adamw, batch, small_model, train_step

STEPS = 24
TWO = arrange(0, [0, 0], 1)


def ab(**changes: Any) -> thinwire.AB:
    """A warm-up of 4 steps, an average every 3, factors from step 10 on."""
    settings = {"total_steps": STEPS, "warmup": 4, "every": 3, "factor_at": 10, "redecompose": 2, "cutoff": 0.3}
    return thinwire.AB(**{**settings, "warmup_wire": "lowrank:2", "group_size": 1, **changes})


def workload(**changes: Any) -> Workload:
    settings = {"name": "small", "model": small_model(), "optimizer": torch.optim.AdamW, "steps": STEPS}
    return Workload(**{**settings, "inputs": (batch(0, 0)[0],), **changes})


def size_of_model(found: Simulation, phase: str = "factored") -> int:
    return sum(p.numel() for p in found.shapes[phase].parameters())


# Ranks.


@pytest.mark.parametrize("target", [1.5, 2.5])
def test_a_target_is_reached_with_one_share_of_every_layers_ranks(target: float) -> None:
    what = workload()
    found = simulate(what, ab(target=target), TWO, predicted.typical)
    full = sum(p.numel() for p in what.model.parameters())
    assert 0.9 * full / target < size_of_model(found) <= full / target
    assert "every layer keeps the same share of its ranks" in found.assumes
    for bound in (predicted.lowest, predicted.highest):  # the size is known, so there is no range
        assert simulate(what, ab(target=target), TWO, bound).ledger.slow_bytes == found.ledger.slow_bytes


def test_a_plan_for_a_target_has_no_range() -> None:
    what = workload()
    plan = make_plan(
        what,
        {"by size": ab(target=2), "by cutoff": ab()},
        Layout(workers=2),
        Links(),
        stopwatch=Stopwatch(what, given(0.1)),
    ).as_dict()
    by_size, by_cutoff = plan["methods"]
    assert by_size["slow_bytes_range"] is None and by_cutoff["slow_bytes_range"] is not None
    assert "by size: if every layer keeps the same share of its ranks." in caption(plan)


def test_typical_ranks_fall_with_the_cutoff() -> None:
    model = small_model()
    layers, _ = find_layers(model, trained=list(model.parameters()))
    largest = max(layers, key=lambda layer: min(layer.view.tall))
    for progress in (0.25, 0.75, 1.0):
        found = [predicted.typical(largest, progress, cutoff) for cutoff in (0.0, 0.1, 0.15, 0.2, 0.5, 1.0)]
        assert found == sorted(found, reverse=True) and found[0] == min(largest.view.tall) and found[-1] == 1
    rank = min(largest.view.tall)
    assert predicted.typical(largest, 1.0, 0.15) == round(0.30 * rank)
    assert predicted.typical(largest, 1.0, 0.2) == round(0.20 * rank)


# Averages that become rarer.


def test_rounds_grow_as_the_rate_of_a_recipe_falls() -> None:
    config = ab(every=2, every_max=9, factor_at=None, cutoff=0.3)
    averages = {}
    for name, rate in (("unknown", None), ("constant", lambda step: 1.0), ("falling", lambda step: 1 - step / STEPS)):
        found = simulate(workload(rate=rate), config, TWO, predicted.typical)
        averages[name] = found.ledger.summary()["by_purpose"]["merge"]["slow_bytes"]
        assert ("the learning rate stays constant, so that `every` does not grow" in found.assumes) == (rate is None)
    assert averages["unknown"] == averages["constant"] > 1.5 * averages["falling"]


def test_a_recipes_plan_knows_its_schedule() -> None:
    what = of_recipe(named("digits"), 2)
    assert what.rate is not None and what.rate(0) < what.rate(30) == 1.0 and what.rate(599) < 0.02
    grown, even = (
        Forecast(what, config, Layout(workers=2), predicted.typical, lambda r, p: given(0.1), lambda r: 0.0)
        for config in (thinwire.AB(total_steps=600, every_max=96), thinwire.AB(total_steps=600))
    )
    assert grown.simulations[0].assumes == "" and grown.slow_bytes < even.slow_bytes


# Memory.


def really_held(rank: int, config: Any) -> dict[str, int]:
    """Bytes of all tensors that attach and training made besides the model's and the optimizer's, at most."""
    gc.collect()
    gc.freeze()  # what was there before is not looked at again
    model = small_model()
    optimizer, held = adamw(model), dict[str, int]()
    batches = [batch(step, rank) for step in range(STEPS)]  # so that they are there before
    kept = sketch(torch.zeros(65))  # its random signs are of one size for all models
    before = storages()
    replica = thinwire.attach(model, optimizer, config)
    for step in range(STEPS):
        phase = replica.phase
        train_step(replica, optimizer, step, rank)
        optimizer.zero_grad()
        if replica.phase == phase:
            gc.collect()
            state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
            own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *state)}
            now = sum(size for key, size in storages().items() if key not in own and key not in before)
            held[phase] = max(held.get(phase, 0), now)
    replica.finish()
    assert batches and kept is not None
    return held


def storages() -> dict[int, int]:
    """Every storage that a tensor of this process has."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


_RARER = (ab(wire="bf16", outer=None), thinwire.DiLoCo(every=3, warmup=4))
HELD = [ab(), *(pytest.param(config, marks=pytest.mark.slow) for config in _RARER)]


@pytest.mark.parametrize("config", HELD)
def test_a_plan_knows_what_a_method_holds_beside_the_model(config: Any) -> None:
    found = gang.run(really_held, 2, config)[0]
    planned = simulate(workload(), config, TWO, predicted.typical).memory
    assert planned.keys() == found.keys()
    for phase in ("warmup", "local"):  # the ranks of the others are not known
        assert sum(planned[phase].method.values()) == pytest.approx(found[phase], rel=0.05, abs=4096), phase


def test_what_is_offloaded_is_on_the_device_only_in_an_average() -> None:
    what = workload()
    there, away = (simulate(what, ab(offload=offload), TWO, predicted.typical) for offload in (False, True))
    assert there.ledger.slow_bytes == away.ledger.slow_bytes and there.state_bytes == away.state_bytes
    for phase in ("local", "factored"):
        here, gone = there.memory[phase], away.memory[phase]
        assert set(here.method) - {"other"} == {"agreed values", "outer momentum", "scratch", "residuals"}
        assert here.in_average == gone.in_average and here.offloaded == 0
        small = gone.method["other"]  # lengths of changes, and sketches of them
        assert gone.in_step == gone.model + gone.optimizer + small and small < 0.1 * gone.offloaded
    assert away.memory["warmup"].offloaded == 0
    activations = 10 * there.state_bytes
    assert there.memory["local"].peak(activations) == there.memory["local"].held + activations
    assert away.memory["local"].peak(activations) == away.memory["local"].in_step + activations
    assert away.memory["local"].peak(0) == away.memory["local"].in_average
    told = beside({phase: memory.as_dict() for phase, memory in away.memory.items()})
    assert "agreed values" in told and "on the CPU between averages" in told


# Seconds.


@pytest.mark.parametrize(("recipe", "compute"), [("digits", 0.013), ("shakespeare", 0.12)])
def test_over_a_slow_link_a_step_is_little_more_than_its_compute(recipe: str, compute: float) -> None:
    """Two nodes at 100 Mbit/s; compute as measured on a core of 2026."""
    what = of_recipe(named(recipe), 2)
    config = thinwire.AB(total_steps=what.steps)
    forecast = Forecast(
        what, config, Layout(workers=2, nodes=2), predicted.typical, lambda r, p: given(compute), lambda r: 0.0
    )
    links = Links(bandwidth=1e8)
    split = forecast.seconds(links)
    assert split["compute"] == pytest.approx(what.steps * compute)
    assert sum(split.values()) / split["compute"] <= 1.1
    # An average of one step in 24: what is waited for is what all of it takes.
    (simulation, *_) = forecast.simulations
    waited = sum(n * (links.seconds(c.sent) + (c.calls - 1) * links.overhead) for c, n in simulation.calls.items())
    ending = sum(n * links.seconds(c.sent) for c, n in simulation.calls.items() if c.purpose == "evaluate")
    assert split["wire"] <= waited and split["wire"] >= waited - 2 * ending - 1e-6
