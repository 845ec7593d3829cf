"""Plans are quick because much is alike: one worker stands for many, one cycle for all, one pass for a shape."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import needs
import thinwire
from selection import first_of, slow_but
from thinwire.cli import main
from thinwire.config.common import Nesterov
from thinwire.exchange.averaged import AveragedTensors
from thinwire.factor.convert import Layer
from thinwire.methods.runner import Runner
from thinwire.plan import ranks as predicted
from thinwire.plan.compute import given
from thinwire.plan.forecast import SOME_NODES, Forecast, Layout, Links, simulate_views
from thinwire.plan.planner import Plan, Stopwatch, make_plan, over_nodes, total
from thinwire.plan.shapes_only import ShapesOnly
from thinwire.plan.simulate import Simulation, _Simulator, simulate
from thinwire.plan.simulated_wire import SimulatedWire
from thinwire.plan.workload import Workload

STEPS = 150


class Normed(nn.Module):
    """Running statistics, a table, and layers that are used in another order than they were made in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(24, 5), nn.Linear(12, 32)
        self.norm, self.middle = nn.BatchNorm1d(32), nn.Linear(32, 24)
        self.register_buffer("table", torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.norm(self.first(x))))


def workload(**changes: Any) -> Workload:
    settings = {"name": "normed", "model": Normed(), "optimizer": torch.optim.AdamW, "steps": STEPS}
    return Workload(**{**settings, "inputs": (torch.randn(4, 12),), **changes})


def every_method(steps: int = STEPS, group_size: Any = None) -> dict[str, Any]:
    own = {"group_size": group_size}
    return {
        "allreduce": thinwire.AllReduce(**own),
        "ab": thinwire.AB(total_steps=steps, every=6, **own),
        "ab-paper": thinwire.AB.paper(total_steps=steps, **own),
        "oialr": thinwire.OIALR(total_steps=steps, **own),
        "daso": thinwire.DASO(total_steps=steps, **own),
        "localsgd": thinwire.LocalSGD(**own),
        "diloco": thinwire.DiLoCo(**own),
        "powersgd": thinwire.PowerSGD(**own),
        "topk": thinwire.TopK(**own),
        "onebit": thinwire.OneBit(**own),
    }


def counted(found: Simulation) -> dict[str, Any]:
    """All that a plan takes from a simulation, calls in their order: seconds are sums in that order."""
    rows = [row[:5] for row in found.ledger.state()["rows"]]
    calls, exchanges = list(found.calls.items()), list(found.exchanges.items())
    own = {name: getattr(found, name) for name in ("steps", "times", "decomposed", "sharers", "assumes")}
    return {"rows": rows, "calls": calls, "exchanges": exchanges, **own}


CODED = {
    "allreduce, int8": thinwire.AllReduce(wire="int8"),
    "daso, int8": thinwire.DASO(total_steps=60, wire="int8", overlap=3),
    "diloco, int8": thinwire.DiLoCo(every=7, fragments=2, overlap=3, wire="int8"),
    "ab-paper, int4": thinwire.AB.paper(total_steps=60, wire="int4", warmup_wire="lowrank:2"),
    "oialr, topk": thinwire.OIALR(total_steps=60, wire="topk:0.1", warmup_wire="bit"),
    "localsgd, lowrank": thinwire.LocalSGD(warmup=9, every=7, wire="lowrank:2", warmup_wire="topk:0.1"),
}


@pytest.mark.parametrize("name", slow_but(("localsgd", "topk"), [*every_method(60), *CODED]))
def test_a_worker_stands_for_those_that_do_the_same(name: str) -> None:
    """Even nodes, ragged groups, and groups of several nodes."""
    config = {**every_method(60), **CODED}[name]
    what = workload(steps=60, inputs=())
    for layout, size in ((Layout(workers=6, nodes=3), None), (Layout(workers=5), 2), (Layout(workers=10, nodes=5), 4)):
        views = layout.views(size, 16)
        together = simulate_views(views, what, config, predicted.typical, shapes=False)
        alone = [simulate(what, config, view, predicted.typical) for view in views]
        assert [counted(found) for found in together] == [counted(found) for found in alone]
        # Groups own parts of a coded sum, some larger by a block or two.
        for found, own in zip(together, alone, strict=True):
            assert found.memory.keys() == own.memory.keys()
            assert all(abs(found.memory[phase].held - own.memory[phase].held) < 8192 for phase in own.memory)


SPLIT = thinwire.AB(total_steps=60, every=6, factor_at=0.3, train="split")


@pytest.mark.parametrize("name", slow_but(("allreduce, int8", "ab", "topk"), ["ab", "onebit", "topk", "split", *CODED]))
def test_one_simulation_is_for_all_numbers_of_groups(name: str) -> None:
    """What a code sends depends on how many groups there are; what workers do does not."""
    config = {**every_method(60), **CODED, "split": SPLIT}[name]
    what, layouts = workload(steps=60, inputs=()), [Layout(workers=2 * nodes, nodes=nodes) for nodes in (8, 2, 3, 16)]
    views = [layout.topology(2, None) for layout in layouts]
    together = simulate_views(views, what, config, predicted.typical, shapes=False)
    alone = [simulate(what, config, view, predicted.typical) for view in views]
    assert [counted(found) for found in together] == [counted(found) for found in alone]
    assert together[0].memory == alone[0].memory
    assert (together[1].times is together[0].times) is (name not in ("split", "ab-paper, int4"))


CYCLES = {
    "ab": thinwire.AB(total_steps=STEPS, every=6, warmup_wire="lowrank:2"),
    "ab, split": thinwire.AB(total_steps=STEPS, every=6, train="split", redecompose=1, warmup=4),
    "ab, every_max": thinwire.AB(total_steps=STEPS, every=6, every_max=18, warmup_wire="lowrank:2"),
    "localsgd": thinwire.LocalSGD(every=5, warmup=3, moments="average", wire="bf16"),
    "diloco": thinwire.DiLoCo(every=6, warmup=7),
    "diloco, streaming": thinwire.DiLoCo(every=7, fragments=3, overlap=2),
    "diloco, int8": thinwire.DiLoCo(every=7, fragments=2, overlap=3, wire="int8"),
    "diloco, topk": thinwire.DiLoCo(every=7, fragments=2, overlap=3, wire="topk:0.1"),
    "daso": thinwire.DASO(total_steps=STEPS),
    "daso, lowrank": thinwire.DASO(total_steps=STEPS, wire="lowrank:2", overlap=3, warmup_wire="bit"),
    "daso, all wait": thinwire.DASO(total_steps=STEPS, overlap=4),
    "daso, int8": thinwire.DASO(total_steps=STEPS, wire="int8", overlap=3),
    "daso, sharded": thinwire.DASO(total_steps=STEPS, sharded=True),
}


# An evaluation may fall anywhere in a cycle.
@pytest.mark.parametrize("eval_every", first_of([23, None]))
@pytest.mark.parametrize("name", slow_but(("ab", "localsgd", "diloco, streaming", "daso, int8"), CYCLES))
def test_cycles_count_as_if_they_were_taken(name: str, eval_every: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CYCLES[name]
    view = Layout(workers=6, nodes=2).topology(0, None)
    what = workload(inputs=(), eval_every=eval_every)
    quick, taken = _counting_steps(what, config, view, monkeypatch)
    monkeypatch.setattr(Runner, "cycle", None)
    slow, all_of_them = _counting_steps(what, config, view, monkeypatch)
    assert counted(quick) == counted(slow) and quick.memory == slow.memory
    assert taken < all_of_them


@pytest.mark.parametrize("redecompose", first_of([1, 3]))
@pytest.mark.parametrize("falls", [False, True])
def test_decompositions_count_as_if_they_were_taken(
    redecompose: int, falls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that find the same ranks are not simulated again; the model kept for its shape is the same one."""

    def predict(layer: Layer, progress: float, cutoff: float | None) -> int:
        return int(12 - 8 * progress) if falls else 5

    steps = STEPS * redecompose  # enough decompositions for some to be alike
    config = thinwire.AB(
        total_steps=steps - 30, every=3, factor_at=0.3, redecompose=redecompose, warmup_wire="lowrank:2"
    )
    view = Layout(workers=4, nodes=2).topology(0, None)
    quick, taken = _counting_steps(workload(steps=steps), config, view, monkeypatch, predict)
    monkeypatch.setattr(Runner, "cycle", None)
    slow, all_of_them = _counting_steps(workload(steps=steps), config, view, monkeypatch, predict)
    assert counted(quick) == counted(slow) and quick.memory == slow.memory
    assert _signatures(quick) == _signatures(slow)
    assert taken < all_of_them * (0.75 if falls else 0.5)


@pytest.mark.parametrize("eval_every", [10, 23])
def test_a_step_stands_for_others_only_if_they_are_equal(eval_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations cut rounds into pieces, and each round wraps the model again."""
    what, view = workload(eval_every=eval_every), Layout(workers=4, nodes=2).topology(0, None)
    config = thinwire.AB(total_steps=STEPS, every=6, redecompose=3, warmup_wire="lowrank:2")
    quick, taken = _counting_steps(what, config, view, monkeypatch)
    monkeypatch.setattr(Runner, "cycle", None)
    monkeypatch.setattr("thinwire.plan.simulate._UNEQUAL_STEPS", STEPS)
    slow, all_of_them = _counting_steps(what, config, view, monkeypatch)
    assert counted(quick) == counted(slow) and quick.memory == slow.memory
    assert taken < all_of_them == STEPS


def _signatures(found: Simulation) -> dict[str, list[Any]]:
    return {
        phase: [(name, p.shape, p.requires_grad) for name, p in model.named_parameters()]
        for phase, model in found.shapes.items()
    }


def _counting_steps(
    what: Workload,
    config: Any,
    view: Any,
    monkeypatch: pytest.MonkeyPatch,
    predict: predicted.RankPredictor = predicted.typical,
) -> tuple[Simulation, int]:
    taken: list[int] = []
    with monkeypatch.context() as patched:
        step = _Simulator._step
        patched.setattr(_Simulator, "_step", lambda self, times: (taken.append(times), step(self, times))[1])
        found = simulate(what, config, view, predict)
    return found, len(taken)


@pytest.mark.slow
def test_other_numbers_of_nodes_are_as_if_planned_by_themselves() -> None:
    what = workload(steps=40, inputs=())
    configs = {name: every_method(40)[name] for name in ("ab-paper", "daso", "topk", "onebit")}
    watch = Stopwatch(what, given(0.01))
    plan = make_plan(what, configs, Layout(workers=4, nodes=2), Links(), stopwatch=watch)
    table = over_nodes(plan, [2, 8])
    for count in (2, 8):
        layout = Layout(workers=2 * count, nodes=count)
        alone = {
            name: Forecast(what, config, layout, predicted.typical, watch, watch.decomposing, SOME_NODES)
            for name, config in {"usual": thinwire.AllReduce(), **configs}.items()
        }
        seconds = {name: total(forecast, plan.links) for name, forecast in alone.items()}
        assert table[count] == {name: seconds["usual"] / seconds[name] for name in configs}


class Calls(TorchDispatchMode):
    """Counts the operations that torch computes, besides making an empty tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is not torch.ops.aten.empty_strided.default
        return func(*args, **(kwargs or {}))


OPERATIONS = {
    "by element": lambda x, y, s: x / (y + s),
    "in place": lambda x, y, s: x.clamp_(max=3).sqrt_().mul_(s),
    "into another": lambda x, y, s: torch.add(x, y, out=x),
    "a product": lambda x, y, s: x @ y.T,
    "of lists": lambda x, y, s: torch._foreach_div(torch._foreach_mul([x, y], s), [s, s])[1],
    "of lists, in place": lambda x, y, s: (torch._foreach_maximum_([x], [y]), x)[1],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_shapes_are_computed_once(name: str) -> None:
    """And they are those that torch computes; the second time it computes nothing."""
    one, two = torch.empty(5, 3, device="meta"), torch.empty(3, 5, dtype=torch.float64, device="meta").T
    two = two.float() if "lists" in name or "into" in name or name == "a product" else two
    number, operation = torch.tensor(2.0), OPERATIONS[name]
    usual = operation(one.clone(), two.clone(), number)
    with ShapesOnly():
        operation(one, two, number)
    with Calls() as calls, ShapesOnly():
        again = operation(one, two, number)
    assert (again.shape, again.stride(), again.dtype) == (usual.shape, usual.stride(), usual.dtype)
    assert calls.count == (1 if name == "a product" else 0)  # the transposed view


def test_a_simulated_average_computes_nothing_for_each_tensor() -> None:
    """Its operations do not grow with the number of tensors, as packing and unpacking them would."""

    def average(tensors: int) -> int:
        model = nn.ParameterList([nn.Parameter(torch.empty(8, 8, device="meta")) for _ in range(tensors)])
        wire = SimulatedWire([Layout(workers=4, nodes=2).topology(0, None)])
        averaged = AveragedTensors(wire, lambda: list(model), "int2", 0, outer=Nesterov(1.0, 0.5))
        with ShapesOnly(), Calls() as calls:
            averaged.send(1, 0)
            assert averaged.receive()
            averaged.agree()
            averaged.move(1.0, 1)
        return calls.count

    assert average(40) - average(4) < 40


def gpt2() -> Workload:
    """transformers' default, 124 M parameters, without values."""
    transformers = needs.package("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    model.tie_weights()
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    return Workload(name="gpt2", model=model, optimizer=torch.optim.AdamW, steps=10_000, inputs=(tokens,))


@pytest.mark.slow
def test_a_large_plan_takes_few_passes_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten methods on 128 × 8 workers: a pass for each shape of layers, no copy for each worker."""
    what, passes, copies, steps = gpt2(), [0], [0], [0]
    deepcopy, step, call = copy.deepcopy, _Simulator._step, Workload.call

    def counting(thing: Any, memo: Any = None) -> Any:
        copies[0] += isinstance(thing, nn.Module) and memo is None
        return deepcopy(thing, memo)

    def calling(self: Workload, *args: Any) -> Any:
        passes[0] += 1
        return call(self, *args)

    def stepping(self: _Simulator, times: int) -> None:
        steps[0] += 1
        step(self, times)

    monkeypatch.setattr(copy, "deepcopy", counting)
    monkeypatch.setattr(_Simulator, "_step", stepping)
    monkeypatch.setattr(Workload, "call", calling)
    layout, watch = Layout(workers=1024, nodes=128), Stopwatch(what, given(0.18))
    plan = make_plan(what, every_method(10_000), layout, Links(), stopwatch=watch)
    assert [row.method for row in plan.rows] == list(every_method())
    assert passes[0] <= 4 and copies[0] <= 12
    assert steps[0] < 1_600


# The command.

TINY = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny.py").write_text(TINY)
    given = ["--steps", "50", "--compute", "5ms", "--workers", "4", "--nodes", "2", "--out", str(tmp_path / "out")]
    return ["plan", "--model", f"{tmp_path / 'tiny.py'}:build", *given]


def test_what_is_worked_on_is_said_and_rows_come_one_by_one(words: list[str]) -> None:
    """The second method cannot be planned, and the first one's row is there all the same."""
    result = CliRunner().invoke(main, [*words, "--methods", "allreduce,diloco:fragments=40"])
    assert result.exit_code == 2 and "`fragments`=40" in result.stderr
    said = [
        "building the model",
        "planning fp32 all-reduce",
        "planning allreduce (1 of 2)",
        "planning diloco:fragments=40",
    ]
    places = [result.stderr.index(each) for each in said]
    assert places == sorted(places)
    assert any(line.split()[:1] == ["allreduce"] for line in result.stdout.splitlines())
    assert "\x1b" not in result.output


def test_a_quiet_plan_has_rows_alone(words: list[str]) -> None:
    result = CliRunner().invoke(main, [*words, "--methods", "allreduce,powersgd", "--quiet"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "" and "powersgd" in result.stdout and "Speed-up over fp32" in result.stdout


def test_json_is_all_that_is_said(words: list[str]) -> None:
    result = CliRunner().invoke(main, [*words, "--methods", "allreduce", "--json"])
    assert result.stderr == "" and json.loads(result.stdout)["methods"][0]["method"] == "allreduce"


def test_a_plan_without_matplotlib_is_a_plan(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    result = CliRunner().invoke(main, [*words, "--methods", "allreduce,localsgd"])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "no picture" in line]
    assert "matplotlib" in line and "thinwire[plot]" in line
    told = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [row["method"] for row in told["methods"]] == ["allreduce", "localsgd"]
    assert not (tmp_path / "out" / "plan.png").exists()


def test_callers_hear_of_each_row() -> None:
    what, heard = workload(steps=20), []

    def after(plan: Plan, row: Any) -> None:
        heard.append((row.method, len(plan.rows), plan.row_as_dict(row)["slow_bytes"] > 0))

    configs = {"allreduce": thinwire.AllReduce(), "topk": thinwire.TopK()}
    watch = Stopwatch(what, given(0.1))
    make_plan(
        what, configs, Layout(workers=2), Links(), stopwatch=watch, before=lambda name: heard.append(name), after=after
    )
    assert heard == ["allreduce", ("allreduce", 1, True), "topk", ("topk", 2, True)]
