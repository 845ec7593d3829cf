"""Plans: what a simulation counts is what a run then counts, and times follow from it."""

import functools
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

import gang
import thinwire
from selection import first_of, slow_but
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.comm.ledger import mean_over_nodes
from thinwire.comm.topology import Sent, Topology, arrange
from thinwire.commands.plan import Rows
from thinwire.methods import PaperAB
from thinwire.plan import compute
from thinwire.plan import ranks as predicted
from thinwire.plan.compute import Compute, given, measure
from thinwire.plan.forecast import Forecast, Layout, Links
from thinwire.plan.planner import Stopwatch, make_plan, over_nodes, pays_below
from thinwire.plan.simulate import Workload, simulate
from thinwire.plan.workload import of_recipe
from thinwire.recipes import Recipe, named
from thinwire.train import fit
from thinwire.train.task import PREDICT
from worlds import ab, adamw, batch, small_model, train_step

STEPS = 24


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are measured as ever, but nothing here depends on how well."""
    monkeypatch.setattr(compute, "_LEAST_S", 0.05)


def workload(**changes: Any) -> Workload:
    settings = {"name": "small", "model": small_model(), "optimizer": torch.optim.AdamW, "steps": STEPS}
    return Workload(**{**settings, "inputs": (batch(0, 0)[0],), **changes})


# Bytes.


class Awkward(nn.Module):
    """Tied weights, a frozen layer, and attention, which reads weights instead of calling its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.frozen = nn.Linear(32, 32)
        self.wide = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32))
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(h + self.wide(self.frozen(h)))


class Sequences:
    """Numbers that follow one another."""

    train_size, heldout_size = 64, 8

    def train(self, indices: np.ndarray, draws: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = (torch.as_tensor(indices)[:, None] + torch.arange(6)) % 16
        return x, (x + 1) % 16

    heldout = train


def recipe_named(name: str) -> Recipe:
    if name == "digits":
        return named("digits", steps=STEPS)
    return Recipe(
        name="awkward",
        summary="",
        task=PREDICT,
        source=lambda folder: Sequences(),
        model=lambda source: Awkward(),
        optimizer=lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3),
        steps=STEPS,
        batch=16,
        eval_every=5,
    )


def planned(name: str, config: Any, workers: int, ranks: Path | None) -> dict[str, Any]:
    what = of_recipe(recipe_named(name), workers)
    predict = predicted.Recorded(ranks) if ranks else predicted.typical
    layout = Layout(workers=workers)
    return Forecast(what, config, layout, predict, Stopwatch(what, given(0.1)), lambda r: 0.0).ledger.summary()


def without_seconds(traffic: dict[str, Any]) -> dict[str, Any]:
    drop = lambda table: {k: {n: v for n, v in row.items() if n != "seconds"} for k, row in table.items()}  # noqa: E731
    return {k: drop(v) if isinstance(v, dict) else v for k, v in traffic.items()}


def oialr(**changes: Any) -> thinwire.OIALR:
    """Full rank for 4 steps, an update every 3."""
    return thinwire.OIALR(**{"total_steps": STEPS, "factor_at": 4, "redecompose": 3, "layer_fraction": 0.5, **changes})


def ab_new(**changes: Any) -> thinwire.AB:
    """A warm-up of 4 steps, an average every 3, factors from step 10 on."""
    settings = {"total_steps": STEPS, "warmup": 4, "every": 3, "factor_at": 10, "redecompose": 2, "cutoff": 0.3}
    return thinwire.AB(**{**settings, "warmup_wire": "lowrank:2", "group_size": 1, **changes})


EXACT = {
    "allreduce": (2, thinwire.AllReduce()),
    "allreduce, pairs": (4, thinwire.AllReduce(group_size=2)),
    "bf16": (3, thinwire.AllReduce(wire="bf16")),
    "ab-paper": (2, ab(cutoff=0.3)),
    "ab-paper, three": (3, ab(cutoff=0.3)),
    "ab-paper, pairs": (4, ab(cutoff=0.3, group_size=2)),
    "ab-paper, world": (2, ab(cutoff=0.3, group_size="world")),
    "ab-paper, bf16, average": (2, ab(cutoff=0.3, wire="bf16", moments="average")),
    "ab-paper, carry, trained": (2, ab(cutoff=0.3, moments="carry", merge="trained", warmup=0)),
    "ab-paper, weighted": (2, ab(cutoff=0.3, merge="weighted", lr_rebound=0)),
    "ab-paper, no rebound": (4, ab(cutoff=0.3, rebound=0, group_size=2)),
    "oialr": (2, oialr(cutoff=0.3, wire="bf16")),
    "oialr, pairs": (4, oialr(cutoff=0.3, group_size=2, max_shrink=1.0)),
    "oialr, at once": (3, oialr(cutoff=0.3, factor_at=0, updates_from=4)),
    "localsgd, bf16": (3, thinwire.LocalSGD(every=5, warmup=3, wire="bf16", group_size=2)),
    "localsgd, average": (2, thinwire.LocalSGD(every=7, moments="average")),
    "diloco": (2, thinwire.DiLoCo(every=5, warmup=3)),
    "diloco, streaming": (3, thinwire.DiLoCo(every=7, fragments=3, overlap=2, group_size=2)),
    "diloco, int8": (3, thinwire.DiLoCo(every=7, fragments=2, overlap=3, wire="int8")),
    "int8, pairs": (4, thinwire.AllReduce(wire="int8", group_size=2)),
    "powersgd": (3, thinwire.PowerSGD(warmup=4, group_size=2)),
    "topk": (4, thinwire.TopK(density=0.05, warmup=3, ramp=8, clip=1.0, group_size=2)),
    "onebit": (3, thinwire.OneBit(warmup=4)),
    "ab-paper, codes": (2, ab(cutoff=0.3, wire="int4", warmup_wire="lowrank:2")),
    "oialr, codes": (3, oialr(cutoff=0.3, wire="topk:0.1", warmup_wire="int2", group_size=2)),
    "localsgd, codes": (
        3,
        thinwire.LocalSGD(every=5, warmup=3, wire="lowrank:2", warmup_wire="topk:0.1", group_size=2),
    ),
    "daso, codes": (
        3,
        thinwire.DASO(
            total_steps=STEPS,
            every=4,
            overlap=3,
            wire="lowrank:2",
            warmup_wire="bit",
            plateau_patience=None,
            group_size=2,
        ),
    ),
    "ab": (2, ab_new(wire="int2", offload=True)),
    "ab, every_max": (2, ab_new(every=2, every_max=7, factor_at=16)),
    "ab, every_max, at once": (2, ab_new(every=2, every_max=9, factor_at=None, warmup=0)),
    "ab, target": (2, ab_new(target=1.5)),
    "ab, target, pairs": (4, ab_new(target=1.5, group_size=2, moments="average")),
    "ab, three, split": (3, ab_new(train="split", merge="weighted")),
    "ab, pairs, overlap": (4, ab_new(overlap=2, group_size=2, train="both")),
    "localsgd, every_max": (2, thinwire.LocalSGD(every=2, every_max=9, warmup=3)),
    "awkward": (2, thinwire.AllReduce()),
    "awkward ab": (2, ab_new(cutoff=0.6, keep_first=False)),
    "awkward ab-paper": (2, ab(cutoff=0.6, keep_first=False, keep_last=False)),
    "awkward ab-paper, pairs": (4, ab(cutoff=0.6, group_size=2, moments="average", rebound=0)),
    "awkward oialr": (2, oialr(cutoff=0.6, keep_last=False)),
    "awkward powersgd": (2, thinwire.PowerSGD(rank=2)),
    "awkward topk": (2, thinwire.TopK(density=0.05)),
    "awkward diloco": (2, thinwire.DiLoCo(every=4, fragments=3, wire="bf16")),
}


def recipe_of(name: str) -> str:
    return "awkward" if name.startswith("awkward") else "digits"


def all_sent(rank: int, names: list[str], folder: str) -> dict[str, dict[str, Any]]:
    """Whole runs by `fit`, one after the other in the same workers, and their summaries' traffic."""
    runs = {name: (recipe_named(recipe_of(name)), EXACT[name][1]) for name in names}
    return {name: fit(*run, out=Path(folder) / name, model=False)["traffic"] for name, run in runs.items()}


def is_quick(name: str) -> bool:
    return EXACT[name][0] == 2 and recipe_of(name) == "digits"


@pytest.fixture(scope="module")
def really_sent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The folder of all runs, and the traffic of one; those with as many workers, as quick or slow, run with it."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def of(workers: int, quick: bool) -> dict[str, dict[str, Any]]:
        names = [name for name, (own, _) in EXACT.items() if own == workers and is_quick(name) == quick]
        return gang.run(all_sent, workers, names, str(folder))[0]

    return lambda name: (folder, of(EXACT[name][0], is_quick(name))[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but([name for name in EXACT if is_quick(name)], EXACT))
def test_a_plan_says_what_the_ledger_then_counts(name: str, really_sent: Any) -> None:
    (workers, config), (folder, found) = EXACT[name], really_sent(name)
    found_ranks = isinstance(config, thinwire.AB) and config.factor_at is not None
    found_ranks = found_ranks or isinstance(config, PaperAB | thinwire.OIALR)
    ranks = folder / name if found_ranks else None
    plan = planned(recipe_of(name), config, workers, ranks)
    assert without_seconds(plan) == without_seconds(found)


def test_steps_that_are_alike_count_as_if_they_were_taken() -> None:
    """A method whose every step may differ is simulated step by step, with the same result."""
    from thinwire.methods.runner import Runner

    quick = simulate(workload(), ab(), arrange(0, [0, 0], None), predicted.typical)
    kept = Runner.next_event
    Runner.next_event = property(lambda self: self.step + 1)  # type: ignore[assignment]
    try:
        slow = simulate(workload(), ab(), arrange(0, [0, 0], None), predicted.typical)
    finally:
        Runner.next_event = kept  # type: ignore[method-assign]
    assert without_seconds(quick.ledger.summary()) == without_seconds(slow.ledger.summary())
    assert quick.steps == slow.steps and quick.calls == slow.calls and quick.exchanges == slow.exchanges


def test_typical_lies_between_the_least_and_the_most() -> None:
    at = {f.__name__: simulate(workload(), ab(), arrange(0, [0, 0], None), f) for f in SCENARIOS}
    sent = {name: r.ledger.slow_bytes for name, r in at.items()}
    assert sent["lowest"] < sent["typical"] <= sent["highest"]


SCENARIOS = (predicted.lowest, predicted.typical, predicted.highest)


def test_a_rehearsal_leaves_the_model_alone() -> None:
    what = workload()
    before = {k: v.clone() for k, v in what.model.state_dict().items()}
    simulate(what, ab(), arrange(0, [0, 0], None), predicted.typical)
    assert type(what.model[3]) is nn.Conv2d
    for k, v in what.model.state_dict().items():
        assert torch.equal(v, before[k]), k


# Seconds.


def test_a_ring_takes_its_bytes_over_the_bandwidth_and_a_latency_a_round() -> None:
    links = Links(bandwidth=1e8, latency=1e-3, payload=1.0, overhead=0)
    four = arrange(0, [0, 1, 2, 3], None)
    size = 4_000_000
    assert links.seconds(four.ring(four.world, size)) == pytest.approx(1.5 * size * 8 / 1e8 + 6 * 1e-3)


def test_a_tree_trades_rounds_for_nothing_in_bytes() -> None:
    many = arrange(0, list(range(64)), None)
    ring, tree = many.ring(many.world, 1 << 20), many.double_tree(many.world, 1 << 20)
    assert tree.slow == ring.slow and (ring.slow_rounds, tree.slow_rounds) == (126, 12)
    chosen = Topology(0, many.nodes, many.groups, "tree")
    assert chosen.all_reduce(many.world, 1 << 20) == tree


def test_two_workers_a_node_put_a_flat_ring_on_one_link_each() -> None:
    """gloo's ring over 2 × 2: every node's link carries 1.5 of the size, once."""
    topology = arrange(0, [0, 0, 1, 1], None)
    sent = topology.ring(topology.world, 1000)
    assert (sent.slow, sent.fast, sent.slow_queue, sent.slow_rounds) == (1500, 1500, 1500, 6)


def test_shares_cross_at_once_but_share_the_link() -> None:
    a, b = Sent(slow=10, slow_queue=10, slow_rounds=4), Sent(slow=6, slow_queue=6, slow_rounds=4)
    assert a.in_parallel(b) == Sent(slow=16, slow_queue=16, slow_rounds=4)
    assert a + b == Sent(slow=16, slow_queue=16, slow_rounds=8)
    each = Sent(*range(1, 7))
    assert each + each == Sent(*range(2, 14, 2))


def test_what_is_hidden_behind_the_backward_pass_is_not_waited_for() -> None:
    links = Links(bandwidth=8e6, latency=0, payload=1.0, overhead=0)  # 1 MB a second
    second = Sent(slow=1_000_000, slow_queue=1_000_000)
    assert links.exposed([second, second], [0.0, 2.0], 2.0) == pytest.approx(1.0)
    assert links.exposed([second, second], [0.0, 0.0], 2.0) == pytest.approx(0.0)
    assert links.exposed([second, second], [2.0, 2.0], 2.0) == pytest.approx(2.0)


def test_buckets_are_ready_when_their_last_gradient_is() -> None:
    step = Compute(1.0, 2.0, 0.0, ready=((0.0, 0.0), (0.9, 0.1), (1.0, 1.0)))
    assert step.ready_at([90, 10]) == pytest.approx([0.2, 2.0])
    assert given(3.0).ready_at([50, 50]) == pytest.approx([2.0, 2.0])


def test_on_a_slow_link_time_is_bytes() -> None:
    """Where the wire is everything, the speed-up is the ratio of bytes; on an endless one it is compute."""
    what = workload()
    plan = make_plan(
        what,
        {"allreduce": thinwire.AllReduce(), "ab-paper": ab()},
        Layout(workers=2, nodes=2),
        Links(bandwidth=1e4, latency=0, overhead=0),
        stopwatch=Stopwatch(what, given(1e-6)),
    )
    plain, low_rank = plan.rows
    ratio = plain.forecast.slow_bytes / low_rank.forecast.slow_bytes
    assert low_rank.speedup(plan.baseline, plan.links) == pytest.approx(ratio, rel=0.01)
    endless = Links(bandwidth=1e18, latency=0, overhead=0)
    assert low_rank.speedup(plan.baseline, endless) == pytest.approx(1.0, rel=1e-3)
    assert plain.speedup(plan.baseline, plan.links) == 1.0
    assert pays_below(plain.forecast, plan.baseline, plan.links) == 0.0


@pytest.mark.parametrize(("width", "narrow"), [(80, True), (120, False)])
def test_the_headings_of_a_plan_are_whole_and_above_their_figures(width: int, narrow: bool) -> None:
    row = dict.fromkeys(("slow_bytes_per_step", "slow_bytes", "seconds_per_step", "seconds", "memory_bytes"), 1e6)
    row |= {
        "method": "allreduce:wire=int8",
        "traffic_vs_allreduce_fp32": 0.257,
        "speedup": 1.7,
        "pays_below_bits": 19e9,
    }
    console = Console(file=io.StringIO(), width=width)
    rows = Rows(console, [row["method"]])
    console.print(rows._table(with_names=True))
    rows.add(row | {"slow_bytes_range": (1e6, 2e6)})
    text = console.file.getvalue()
    lines = text.splitlines()
    assert "…" not in text and all(len(line) <= width for line in lines)
    assert ("19 Gbit/s" in text) != narrow and "1.0 MB to 2.0 MB in total" in text
    head, figures = next(line for line in lines if "reduce" in line), next(line for line in lines if "0.257" in line)
    assert head.index("reduce") + len("reduce") == figures.index("0.257") + len("0.257")


def test_a_method_that_computes_more_pays_below_a_bandwidth() -> None:
    what = workload()
    forecasts = [
        Forecast(what, config, Layout(workers=2, nodes=2), predicted.typical, watch, lambda r: 0.0)
        for config, watch in ((thinwire.AllReduce(), lambda r, p: given(0.010)), (ab(), lambda r, p: given(0.011)))
    ]
    links = Links(latency=0, overhead=0)
    edge = pays_below(forecasts[1], forecasts[0], links)
    assert edge is not None and 0 < edge < math.inf
    for factor, sooner in ((0.9, True), (1.1, False)):
        there = Links(bandwidth=edge * factor, latency=0, overhead=0)
        seconds = [sum(f.seconds(there).values()) for f in forecasts]
        assert (seconds[1] < seconds[0]) is sooner


def test_plans_reach_a_thousand_nodes() -> None:
    what = workload(steps=24)
    plan = make_plan(
        what,
        {"allreduce": thinwire.AllReduce(), "ab-paper": ab(group_size=None)},
        Layout(workers=4, nodes=2),
        Links(),
        stopwatch=Stopwatch(what, given(0.01)),
    )
    table = over_nodes(plan, [2, 1024])
    assert set(table) == {2, 1024} and all(v > 0 for row in table.values() for v in row.values())
    assert table[2]["ab-paper"] == pytest.approx(plan.rows[1].speedup(plan.baseline, plan.links))


def test_compute_is_measured_in_the_shape_of_each_phase() -> None:
    what = workload()
    found = simulate(what, ab(cutoff=0.5), arrange(0, [0, 0], None), predicted.lowest)
    full, factored = (measure(what, found.shapes[phase]) for phase in ("warmup", "groups"))
    for step in (full, factored):
        assert step.forward > 0 and step.backward > 0 and step.update > 0
        assert step.activations is not None and step.activations > 0
        shares = [share for share, _ in step.ready]
        assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert type(found.shapes["groups"][7]) is not nn.Linear


def test_values_are_drawn_only_to_time_a_step() -> None:
    plain, built = named("digits", steps=STEPS), []

    def model(source: Any) -> nn.Module:
        built.append(plain.model(source))
        return built[-1]

    what = of_recipe(plain.replace(model=model), 2)
    make_plan(what, {"ab-paper": ab()}, Layout(workers=2), Links(), stopwatch=Stopwatch(what, given(0.1))).as_dict()
    assert [next(each.parameters()).is_meta for each in built] == [True]
    assert measure(what).seconds > 0
    assert [next(each.parameters()).is_meta for each in built] == [True, False]


def test_memory_counts_parameters_gradients_buckets_and_state() -> None:
    what = workload()
    found = simulate(what, thinwire.AllReduce(), arrange(0, [0, 0], None), predicted.typical)
    numbers = sum(p.numel() for p in what.model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in what.model.buffers())
    tensors = len(list(what.model.parameters()))
    # parameters, gradients, buckets, two moments, and a step a parameter
    assert found.state_bytes == 5 * 4 * numbers + buffers + 4 * tensors


def test_tied_weights_stay_tied() -> None:
    what = Workload(name="awkward", model=Awkward(), optimizer=torch.optim.AdamW, steps=1)
    blank = what.without_values
    assert blank.head.weight is blank.embedding.weight and blank.head.weight.is_meta
    assert sum(p.numel() for p in blank.parameters()) == sum(p.numel() for p in what.model.parameters())


def test_shares_that_cross_from_different_nodes_do_not_queue_behind_one_another() -> None:
    """Groups of four nodes: each node carries one share, so four shares cross as fast as one."""
    topology = arrange(0, list(range(8)), 4)
    parts = [(topology.crossing(j), 1000) for j in range(4)]
    one, all_of_them = topology.all_reduce(*parts[0]), topology.at_once(parts)
    assert all_of_them.slow == all_of_them.slow_queue == one.slow == 1000
    tree = Topology(0, topology.nodes, topology.groups, "tree")
    assert tree.at_once(parts).slow == 1000


# Bad input.


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="3 workers cannot be spread evenly over 2 nodes"):
        Layout(workers=3, nodes=2)
    with pytest.raises(ConfigError, match="`bandwidth`=0"):
        Links(bandwidth=0)
    with pytest.raises(ConfigError, match="`latency`=-1"):
        Links(latency=-1)
    with pytest.raises(ConfigError, match="cannot be timed without a batch"):
        Stopwatch(workload(inputs=()))
    with pytest.raises(ConfigError, match="different group sizes"):
        make_plan(
            workload(),
            {"a": ab(group_size=1), "b": ab(group_size=2)},
            Layout(workers=2),
            Links(),
            stopwatch=Stopwatch(workload(), given(1.0)),
        )


def test_ranks_of_a_run_that_factored_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3, "method": "allreduce", "recipe": "digits"}))
    with pytest.raises(ConfigError, match="holds no ranks"):
        predicted.Recorded(tmp_path)
    with pytest.raises(ConfigError, match="there is no finished run"):
        predicted.Recorded(tmp_path / "nowhere")


# The time split of real runs.


def split_of(rank: int, config: Any) -> tuple[dict[str, dict[str, float]], float]:
    import time

    model = small_model()
    optimizer = adamw(model)
    start = time.perf_counter()
    replica = thinwire.attach(model, optimizer, config)
    for step in range(STEPS):
        train_step(replica, optimizer, step, rank)
    replica.finish()
    return replica.traffic.split, time.perf_counter() - start


SPLIT = [thinwire.AllReduce(), thinwire.AllReduce(wire="bf16"), ab(), thinwire.PowerSGD(), thinwire.LocalSGD(every=5)]


CODED = [thinwire.AllReduce(wire="int8", group_size=2), thinwire.PowerSGD(group_size=2)]
"""DDP averages inside a group first: its wait and the exchange after it must not both count the latter."""


def splits_of(rank: int, configs: list[Any]) -> list[tuple[dict[str, dict[str, float]], float]]:
    return [split_of(rank, config) for config in configs]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "configs"), [(2, SPLIT), (4, CODED)])
def test_the_time_split_adds_up(workers: int, configs: list[Any]) -> None:
    for split, wall in (found for worker in gang.run(splits_of, workers, configs) for found in worker):
        assert sum(row["steps"] for row in split.values()) == STEPS
        for row in split.values():
            parts = [row[kind] for kind in ("compute", "wire", "decomposition", "other")]
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(row["seconds"], rel=0.02, abs=1e-3)
        assert sum(row["seconds"] for row in split.values()) <= wall
        trained = [row for row in split.values() if row["steps"]]
        assert all(row["compute"] > 0 for row in trained)
        assert sum(row["wire"] for row in trained) > 0
        assert (split["groups"]["decomposition"] > 0) if "groups" in split else True


def late_worker(rank: int) -> dict[str, float]:
    """Rank 1 dawdles before its forward pass; rank 0, which is in its backward pass by then, waits for it there."""
    import time

    model, store = small_model(), torch.distributed.distributed_c10d._get_default_store()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    step = 0
    # The last layer's gradient comes first, and is averaged with the others once they are all there.
    *_, last = model.parameters()
    last.register_hook(lambda _: store.set(f"backward {step}", "1") if rank == 0 else None)
    for step in range(5):
        if rank == 1 and step > 1:  # before, DDP orders its buckets anew, in a forward pass and together
            store.wait([f"backward {step}"])
            time.sleep(0.2)
        train_step(replica, optimizer, step, rank)
    return replica.traffic.split["train"]


def test_waiting_for_gradients_is_waiting_not_computing() -> None:
    early, late = gang.run(late_worker, 2)
    assert early["wire"] > 0.3 and early["wire"] > late["wire"] + 0.2
    assert late["other"] > 0.5


def test_a_single_worker_waits_for_nobody() -> None:
    split, _ = split_of(0, ab())
    assert all(row["wire"] == 0 for row in split.values())


def test_means_over_nodes_of_ledgers_are_means() -> None:
    one = simulate(workload(), ab(), arrange(0, [0, 0], None), predicted.typical).ledger
    two = simulate(workload(), ab(), arrange(1, [0, 0], None), predicted.typical).ledger
    both = mean_over_nodes([one.state(), two.state()])
    assert both.slow_bytes == pytest.approx((one.slow_bytes + two.slow_bytes) / 2, abs=10)


# The command.

TINY = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

def with_inputs():
    return build(), torch.randn(8, 16)

def by_name():
    return build(), {"input": torch.randn(8, 16)}

def wrong():
    return build(), torch.randn(8, 3)

def three():
    return build(), 1, 2

def words():
    return "words"

def broken():
    raise RuntimeError("no")
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.py").write_text(TINY)
    return str(tmp_path / "tiny.py")


def plan_command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.slow
def test_the_command_draws_and_tells(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--model", f"{tiny}:build", "--steps", "50", "--compute", "5ms", "--workers", "4", "--nodes", "2")
    said = plan_command(
        *words, "--methods", "allreduce,allreduce:wire=bf16,ab-paper", "--bandwidth", "10Mbit", "--out", str(out)
    )
    text = " ".join(said.split())
    assert "allreduce:wire=bf16" in text and "typical run" in text and "Compute as given" in text
    told = json.loads((out / "plan.json").read_text())
    assert (out / "plan.png").stat().st_size > 10_000
    assert told["curves"]["nodes"] == [2**i for i in range(1, 11)]
    assert told["curves"]["bandwidth_bits"][0] == 1e8 and told["curves"]["bandwidth_bits"][-1] == pytest.approx(4e11)
    plain, rounded, low_rank = told["methods"]
    assert rounded["slow_bytes"] < 0.55 * plain["slow_bytes"]
    low, high = low_rank["slow_bytes_range"]
    assert low <= low_rank["slow_bytes"] <= high
    assert plain["seconds_per_step"] > rounded["seconds_per_step"] > 0.005


@pytest.mark.slow
def test_compute_is_timed_where_inputs_are_known(tiny: str) -> None:
    told = json.loads(plan_command("--model", f"{tiny}:with_inputs", "--steps", "100", "--json"))
    assert told["compute_measured"] and told["methods"][-1]["method"] == "ab"
    assert all(row["split"]["compute"] > 0 for row in told["methods"])


def test_inputs_may_have_names(tiny: str) -> None:
    told = json.loads(plan_command("--model", f"{tiny}:by_name", "--steps", "100", "--methods", "allreduce", "--json"))
    assert told["compute_measured"]


@pytest.mark.slow
@pytest.mark.parametrize("method", first_of(["ab-paper", "oialr"]))
def test_a_recipe_and_the_ranks_of_its_run(method: str, tmp_path: Path) -> None:
    words = ["digits", "--steps", "30"]
    run = ["run", *words, "--method", method, "--workers", "1", "--no-model", "--quiet", "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(main, run).exit_code == 0
    methods = ["--methods", f"allreduce,{method}"]
    told = json.loads(plan_command(*words, *methods, "--ranks", str(tmp_path / "run"), "--compute", "5ms", "--json"))
    assert told["ranks"] and all(row["slow_bytes_range"] is None for row in told["methods"])
    said = plan_command("shakespeare", "--ranks", str(tmp_path / "run"), "--compute", "5ms", code=2)
    assert "is a run of another model" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nosuch",), "unknown recipe 'nosuch'"),
        (("digits", "--bandwidth", "fast"), "'fast' is not a valid rate"),
        (("digits", "--latency", "-1us"), "is not a valid time"),
        (("digits", "--workers", "3", "--nodes", "2"), "cannot be spread evenly"),
        (("digits", "--workers", "100"), "cannot be shared by 100 workers"),
        (("digits", "--group-size", "9", "--compute", "1ms"), "`group_size`=9 exceeds"),
        (("digits", "--methods", "sgd", "--compute", "1ms"), "unknown method 'sgd'"),
        (("digits", "--compute", "soon"), "'soon' is not a valid time"),
        (("digits", "--compute", "0s"), "above 0"),
        (("--model", "x.py:f", "--data", "."), "--data is for recipes"),
        ((), "give either RECIPE or --model"),
    ],
)
def test_what_the_command_refuses(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in plan_command(*words, code=2)


def test_models_that_cannot_be_planned_for(tiny: str) -> None:
    for words, sentence in (
        (("--model", f"{tiny}:build"), "needs the steps of a run"),
        (("--model", f"{tiny}:build", "--steps", "100"), "cannot be timed without a batch"),
        (("--model", f"{tiny}:words", "--steps", "100"), "must return an nn.Module"),
        (("--model", f"{tiny}:broken", "--steps", "100"), "failed: RuntimeError: no"),
        (("--model", f"{tiny}:nosuch", "--steps", "100"), "nosuch"),
        (("--model", f"{tiny}:three", "--steps", "100"), "must return an nn.Module"),
        (("--model", f"{tiny}:wrong", "--steps", "100"), "cannot be called without values"),
        (("--model", "nowhere.py:f", "--steps", "100"), "there is no file"),
    ):
        assert sentence in plan_command(*words, code=2)
