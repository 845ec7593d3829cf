"""The plan: every method on the same model, nodes and links, compared with fp32 all-reduce."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.config.settings import describe
from thinwire.factor.convert import find_layers
from thinwire.methods import AllReduce
from thinwire.plan import compute
from thinwire.plan import ranks as predicted
from thinwire.plan.compute import Compute
from thinwire.plan.forecast import ALL_NODES, SOME_NODES, Forecast, Layout, Links, simulate_views
from thinwire.plan.recommend import Recommendation, recommend
from thinwire.plan.simulate import Simulation
from thinwire.plan.workload import Workload

Signature = tuple[tuple[str, tuple[int, ...], bool], ...]

# Range of the search for the bandwidth below which a method is faster.
_LEAST_RATE, _MOST_RATE = 1e5, 1e14


class Stopwatch:
    """Compute times of every shape in a plan, each measured once; or one given time."""

    def __init__(self, workload: Workload, given: Compute | None = None, slowdown: float = 1.0) -> None:
        self.workload = workload
        self.given = given
        self.slowdown = slowdown
        self._known: dict[Signature, Compute] = {}
        self._decompositions: dict[tuple[int, int], float] = {}
        if given is None and not workload.has_inputs:
            raise ConfigError(
                f"a step of {workload.name} cannot be timed without a batch; give its seconds as `compute`, "
                "or a function that returns the model and its inputs"
            )

    def __call__(self, simulation: Simulation, phase: str) -> Compute:
        """The compute time of a step in this phase."""
        if self.given is not None:
            return self.given
        shape = simulation.shapes[phase]
        signature = tuple((name, tuple(p.shape), p.requires_grad) for name, p in shape.named_parameters())
        if signature not in self._known:
            self._known[signature] = compute.measure(self.workload, shape).slower(self.slowdown)
        return self._known[signature]

    def decomposing(self, simulation: Simulation) -> float:
        """Seconds of a worker's decompositions in the run; 0 if compute was given, for another machine."""
        if self.given is not None:
            return 0.0
        for tall in simulation.decomposed.keys() - self._decompositions.keys():
            self._decompositions[tall] = compute.decomposition_seconds(tall) * self.slowdown
        whole = sum(times * self._decompositions[tall] for tall, times in simulation.decomposed.items())
        return whole / simulation.sharers


@dataclass(frozen=True)
class Row:
    """The forecasts of one method."""

    method: str
    forecast: Forecast
    """With recorded or typical ranks."""
    lowest: Forecast | None = None
    highest: Forecast | None = None
    over_nodes: Mapping[int, Forecast] = field(default_factory=dict)
    """With as many workers per node on other numbers of nodes."""

    def speedup(self, baseline: Forecast, links: Links) -> float:
        """The baseline's time divided by this method's."""
        return total(baseline, links) / total(self.forecast, links)


@dataclass
class Plan:
    """All methods, and the baseline."""

    workload: Workload
    layout: Layout
    links: Links
    stopwatch: Stopwatch
    baseline: Forecast
    rows: list[Row] = field(default_factory=list)
    ranks: str | None = None
    """The folder that ranks come from."""

    @property
    def recommendation(self) -> Recommendation:
        """Which of the methods to use on these links."""
        return recommend(self.baseline, {row.method: row.forecast for row in self.rows}, self.links)

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "steps": self.workload.steps,
            "workers": self.layout.workers,
            "nodes": self.baseline.nodes,
            "allreduce": self.layout.algorithm,
            "links": vars(self.links),
            "ranks": self.ranks,
            "compute_measured": self.stopwatch.given is None,
            "methods": [self.row_as_dict(row) for row in self.rows],
            "recommendation": self.recommendation.as_dict(),
        }

    def row_as_dict(self, row: Row) -> dict[str, Any]:
        """One method as plain values."""
        forecast, steps, usual = row.forecast, self.workload.steps, self.baseline.slow_bytes
        split = forecast.seconds(self.links)
        seconds = sum(split.values())
        bounds = [f.slow_bytes for f in (row.lowest, row.highest) if f]
        return {
            "method": row.method,
            "config": describe(forecast.config),
            "slow_bytes": forecast.slow_bytes,
            "slow_bytes_range": sorted(bounds) if bounds else None,
            "slow_bytes_per_step": forecast.slow_bytes / steps,
            "traffic_vs_allreduce_fp32": forecast.slow_bytes / usual if usual else None,
            "traffic": _without_seconds(forecast.ledger.summary()),
            "seconds": seconds,
            "seconds_per_step": seconds / steps,
            "split": split,
            "seconds_by_phase": forecast.seconds_by_phase(self.links),
            "steps_by_phase": dict(forecast.simulations[0].steps),
            "speedup": row.speedup(self.baseline, self.links),
            "pays_below_bits": pays_below(forecast, self.baseline, self.links),
            "memory_bytes": forecast.memory,
            "memory_by_phase": {phase: memory.as_dict() for phase, memory in forecast.memory_by_phase.items()},
            "assumes": forecast.simulations[0].assumes,
        }


def make_plan(
    workload: Workload,
    configs: Mapping[str, Any],
    layout: Layout,
    links: Links,
    *,
    stopwatch: Stopwatch,
    ranks: Path | None = None,
    counts: Iterable[int] = (),
    bounds: bool = True,
    before: Callable[[str], None] = lambda name: None,
    after: Callable[[Plan, Row], None] = lambda plan, row: None,
) -> Plan:
    """Simulate every method; `configs` are by display name, `counts` are other numbers of nodes to simulate.

    Without `bounds` a method whose bytes depend on ranks has no range of them.

    `before` is called with each method's name before its simulation, `after` with each finished row.
    """
    recorded = _recorded(workload, ranks) if ranks else None
    group_size = layout_group_size(configs.values())
    over = _layouts(layout, counts, group_size)

    def forecast(
        config: Any, predict: predicted.RankPredictor, over: Mapping[int, Layout]
    ) -> tuple[Forecast, dict[int, Forecast]]:
        # The first one of those that are simulated together says what a worker holds.
        layouts = [(layout, ALL_NODES), *((there, SOME_NODES) for there in over.values())]
        here, *there = _forecast_all(workload, config, predict, stopwatch, layouts)
        return here, dict(zip(over, there, strict=True))

    usual = AllReduce(group_size=group_size)
    plan = Plan(workload, layout, links, stopwatch, forecast(usual, predicted.typical, {})[0])
    plan.ranks = str(ranks) if ranks else None
    for name, config in configs.items():
        before(name)
        likely, there = forecast(config, recorded or predicted.typical, over)
        lowest = highest = None
        has_target = getattr(config, "target", None) is not None  # it has one size, whatever the ranks
        if bounds and likely.depends_on_ranks and recorded is None and not has_target:
            lowest, highest = (forecast(config, bound, {})[0] for bound in (predicted.lowest, predicted.highest))
        plan.rows.append(Row(name, likely, lowest, highest, there))
        after(plan, plan.rows[-1])
    return plan


def over_nodes(plan: Plan, counts: Iterable[int]) -> dict[int, dict[str, float]]:
    """Speed-up of every method over all-reduce on other numbers of nodes; quick for those the plan was made with."""
    group_size = layout_group_size(row.forecast.config for row in plan.rows)
    recorded = predicted.Recorded(Path(plan.ranks)) if plan.ranks else predicted.typical
    fitting = _layouts(plan.layout, counts, group_size)
    # On other numbers of nodes, all-reduce's nodes are the machines.
    base = _on_layouts(plan, {}, AllReduce(), predicted.typical, fitting)
    rows = {r.method: _on_layouts(plan, r.over_nodes, r.forecast.config, recorded, fitting) for r in plan.rows}
    return {n: {name: base[n] / its[n] for name, its in rows.items()} for n in fitting}


def _on_layouts(
    plan: Plan,
    known: Mapping[int, Forecast],
    config: Any,
    predict: predicted.RankPredictor,
    layouts: Mapping[int, Layout],
) -> dict[int, float]:
    """Seconds of the whole run on each layout."""
    lacking = {count: (layout, SOME_NODES) for count, layout in layouts.items() if count not in known}
    found = _forecast_all(plan.workload, config, predict, plan.stopwatch, list(lacking.values()))
    forecasts = {**known, **dict(zip(lacking, found, strict=True))}
    return {count: total(forecasts[count], plan.links) for count in layouts}


def _layouts(layout: Layout, counts: Iterable[int], group_size: int | None) -> dict[int, Layout]:
    """As many workers per node on other numbers of nodes, unless a group would be larger than the world."""
    over = {count: layout.over(count, group_size) for count in counts}
    return {count: there for count, there in over.items() if group_size is None or group_size <= there.workers}


def _forecast_all(
    workload: Workload,
    config: Any,
    predict: predicted.RankPredictor,
    watch: Stopwatch,
    layouts: Sequence[tuple[Layout, int]],
) -> list[Forecast]:
    """A method on several layouts, each with the most nodes to simulate, in as few simulations as possible."""
    workload = workload.suited_to(config)
    views = [layout.views(config.group_size, most) for layout, most in layouts]
    flat = [view for own in views for view in own]
    found = iter(simulate_views(flat, workload, config, predict, shapes=watch.given is None))
    return [
        Forecast(workload, config, layout, list(islice(found, len(own))), watch, watch.decomposing)
        for (layout, _), own in zip(layouts, views, strict=True)
    ]


def total(forecast: Forecast, links: Links) -> float:
    """Seconds of the whole run."""
    return sum(forecast.seconds(links).values())


def pays_below(forecast: Forecast, baseline: Forecast, links: Links) -> float | None:
    """The bandwidth below which it is faster than the baseline: 0 for never, None for any in the range."""

    def gains(bits: float) -> bool:
        there = Links(**{**vars(links), "bandwidth": bits})
        return total(forecast, there) < total(baseline, there)

    low, high = math.log(_LEAST_RATE), math.log(_MOST_RATE)
    if gains(_MOST_RATE):
        return None
    if not gains(_LEAST_RATE):
        return 0.0
    while high - low > 1e-3:
        middle = statistics.fmean((low, high))
        low, high = (middle, high) if gains(math.exp(middle)) else (low, middle)
    return math.exp(low)


def layout_group_size(configs: Iterable[Any]) -> int | None:
    """The group size that stands for a node on one machine; must be the same for all methods."""
    sizes = {config.group_size for config in configs if isinstance(config.group_size, int)}
    if len(sizes) > 1:
        raise ConfigError(f"methods with different group sizes ({sizes}) cannot be in one plan; plan them separately")
    return sizes.pop() if sizes else None


def _recorded(workload: Workload, folder: Path) -> predicted.Recorded:
    """A run's ranks, which must be of this model's layers."""
    recorded = predicted.Recorded(folder)
    model = workload.without_values
    layers, _ = find_layers(model, trained=list(model.parameters()), keep_first=False, keep_last=False)
    strange = sorted(recorded.labels - {layer.label for layer in layers})
    if strange or workload.recipe not in (None, recorded.recipe):
        lacks = f", with layers such as {strange[0]!r}" if strange else ""
        raise ConfigError(
            f"`{folder}` is a run of another model ({recorded.recipe}{lacks}) than {workload.name}; "
            "give a run of the same one"
        )
    return recorded


def _without_seconds(traffic: dict[str, Any]) -> dict[str, Any]:
    """Remove seconds, which have no meaning in a simulation."""
    for table in (traffic["by_phase"], traffic["by_purpose"]):
        for row in table.values():
            del row["seconds"]
    return traffic
