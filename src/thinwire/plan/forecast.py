"""A method's bytes, seconds and memory on given nodes and links."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.comm.ledger import Ledger, mean_over_nodes
from thinwire.comm.topology import Sent, Topology, arrange
from thinwire.methods.registry import role
from thinwire.plan.compute import Compute
from thinwire.plan.memory import Memory
from thinwire.plan.ranks import RankPredictor
from thinwire.plan.simulate import Simulation, simulate_together
from thinwire.plan.simulated_wire import kind
from thinwire.plan.workload import Workload
from thinwire.shape.agree import decomposers

# The mean over nodes is exact up to here; where only times are needed, a few nodes are enough.
ALL_NODES, SOME_NODES = 16, 2
EVALUATION = "evaluate"
PAYLOAD = 0.935
"""Share of an Ethernet link that TCP leaves to payload: 1448 of 1514 bytes per packet, less acknowledgements."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Workers and the nodes they are on."""

    workers: int
    """All of them."""
    nodes: int | None = None
    """None is one machine, as in `thinwire run`: there a group stands for a node."""
    algorithm: str = "ring"
    """How all-reduce is done: "ring" as gloo does, "tree" as nccl may."""

    def __post_init__(self) -> None:
        if self.nodes is not None and (self.nodes < 1 or self.workers % self.nodes):
            raise ConfigError(
                f"{self.workers} workers cannot be spread evenly over {self.nodes} nodes; "
                f"use a multiple of {max(1, self.nodes)}"
            )

    def topology(self, rank: int, group_size: Any) -> Topology:
        """The layout as one worker sees it."""
        return _arranged(self, group_size).seen_from(rank)

    def views(self, group_size: Any, most: int) -> list[Topology]:
        """Seen from the first worker of each node, or of a few nodes if there are more than `most`."""
        first = _arranged(self, group_size)
        count = len(first.nodes)
        # One from each half if there are many; those near a tree's root send more.
        chosen = range(count) if count <= most else (count // 4, count - 1)
        return [first.seen_from(first.nodes[node][0]) for node in chosen]

    def over(self, nodes: int, group_size: Any) -> "Layout":
        """As many workers per node on another number of nodes."""
        each = max(len(node) for node in self.topology(0, group_size).nodes)
        return Layout(workers=each * nodes, nodes=nodes, algorithm=self.algorithm)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Both links: bandwidth in bits per second each way, latency in seconds one way."""

    bandwidth: float = 1e9
    """Between nodes, of each node's link."""
    latency: float = 50e-6
    """Between nodes."""
    fast_bandwidth: float = 100e9
    """Inside a node, from one worker to another."""
    fast_latency: float = 5e-6
    """Inside a node."""
    overhead: float = 100e-6
    """What a collective costs besides its bytes: software, threads that wake up, the slowest worker's delay."""
    payload: float = PAYLOAD
    """Share of the slow link's bandwidth that is left to payload."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "fast_bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`{name}`={getattr(self, name)!r} must be above 0 bits per second, such as 1Gbit")
        for name in ("latency", "fast_latency", "overhead"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"`{name}`={getattr(self, name)!r} must be a time of 0 or more, such as 50us")
        if not 0 < self.payload <= 1:
            raise ConfigError(f"`payload`={self.payload!r} must be a share above 0, up to 1")

    def seconds(self, sent: Sent) -> float:
        """A collective alone on the links: bytes that queue at the narrowest place, and its rounds' latencies."""
        if not (sent.slow_queue or sent.fast_queue):
            return 0.0
        slow = 8 * sent.slow_queue / (self.bandwidth * self.payload)
        fast = 8 * sent.fast_queue / self.fast_bandwidth
        return self.overhead + max(slow, fast) + sent.slow_rounds * self.latency + sent.fast_rounds * self.fast_latency

    def exposed(self, parts: Sequence[Sent], ready: Sequence[float], end: float) -> float:
        """How long workers wait after `end` for parts that start one after the other, each when it is ready."""
        free = 0.0
        for sent, start in zip(parts, ready, strict=True):
            free = max(free, start) + self.seconds(sent)
        return max(0.0, free - end)


class Forecast:
    """One method on one layout, with ranks as predicted."""

    def __init__(
        self,
        workload: Workload,
        config: Any,
        layout: Layout,
        predicted: RankPredictor | list[Simulation],
        computing: Callable[[Simulation, str], Compute],
        decomposing: Callable[[Simulation], float],
        nodes: int = ALL_NODES,
    ) -> None:
        """From predicted ranks, or from simulations made with them."""
        self.workload = workload
        self.config = config
        views = layout.views(config.group_size, nodes)
        self.nodes, self.groups = len(views[0].nodes), len(views[0].groups)
        if not isinstance(predicted, list):
            predicted = simulate_views(views, workload, config, predicted)
        self.simulations = predicted
        self._computing = computing
        self._decomposing = decomposing

    @property
    def depends_on_ranks(self) -> bool:
        """Whether bytes depend on what decompositions find."""
        return any(r.decomposed for r in self.simulations)

    @cached_property
    def ledger(self) -> Ledger:
        """The mean over nodes, as in a run's summary; for many nodes, over a sample."""
        return mean_over_nodes([r.ledger.state() for r in self.simulations])

    @property
    def slow_bytes(self) -> int:
        """Slow-link bytes per node, without evaluation."""
        return self.ledger.slow_bytes - self.ledger.slow_bytes_for(EVALUATION)

    @property
    def memory(self) -> int:
        """Bytes per worker, with activations if known: in a step or, where more is held then, in an average."""
        peaks = [
            memory.peak(self._computing(r, phase).activations or 0)
            for r in self.simulations
            for phase, memory in r.memory.items()
        ]
        return max(peaks, default=0)

    @property
    def memory_by_phase(self) -> dict[str, Memory]:
        """What the worker with most of it holds, without activations."""
        return max(self.simulations, key=lambda r: r.state_bytes).memory

    def seconds(self, links: Links) -> dict[str, float]:
        """Seconds of a whole run by kind, without evaluation, for the slowest worker."""
        return max((self._seconds(r, links) for r in self.simulations), key=lambda split: sum(split.values()))

    def seconds_by_phase(self, links: Links) -> dict[str, float]:
        """Seconds of each phase without decompositions, for the slowest worker."""
        each = [self._by_phase(r, links) for r in self.simulations]
        return {phase: max(split[phase] for split in each) for phase in each[0]}

    def _seconds(self, simulation: Simulation, links: Links) -> dict[str, float]:
        computing = sum(n * self._computing(simulation, phase).seconds for phase, n in simulation.steps.items())
        whole = sum(self._by_phase(simulation, links).values())
        return {"compute": computing, "wire": whole - computing, "decomposition": self._decomposing(simulation)}

    def _by_phase(self, simulation: Simulation, links: Links) -> dict[str, float]:
        total: dict[str, float] = defaultdict(float)
        for phase, steps in simulation.steps.items():
            total[phase] += steps * self._computing(simulation, phase).seconds
        for call, times in simulation.calls.items():
            if call.purpose != EVALUATION:
                seconds = links.seconds(call.sent) + (call.calls - 1) * links.overhead
                hidden = call.overlap * self._computing(simulation, call.phase).seconds if call.overlap else 0.0
                total[call.phase] += times * max(0.0, seconds - hidden)
        for exchange, times in simulation.exchanges.items():
            step = self._computing(simulation, exchange.phase)
            ready = step.ready_at([max(sent.slow_queue, sent.fast_queue) for sent in exchange.parts])
            total[exchange.phase] += times * links.exposed(exchange.parts, ready, step.backward)
        return dict(total)


def simulate_views(
    views: Sequence[Topology], workload: Workload, config: Any, predict: RankPredictor, *, shapes: bool = True
) -> list[Simulation]:
    """A simulation for each of these workers, of one layout or several; one is run for all that do the same."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i, view in enumerate(views):
        alike[kind(view), decomposers(view), role(config, view)].append(i)
    found: dict[int, Simulation] = {}
    for places in alike.values():
        together = simulate_together(workload, config, [views[i] for i in places], predict, shapes=shapes)
        found.update(zip(places, together, strict=True))
    return [found[i] for i in range(len(views))]


@lru_cache(maxsize=32)
def _arranged(layout: Layout, group_size: Any) -> Topology:
    """Cached with its counts: all methods of a plan use the same layout."""
    nodes = layout.nodes or 1
    first = arrange(0, [r * nodes // layout.workers for r in range(layout.workers)], group_size)
    return replace(first, algorithm=layout.algorithm)
