"""Calibrate plans to this machine: a short all-reduce run over unshaped links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thinwire.launch.jobs import Job
from thinwire.netbench.hosts import Hosts, Probe
from thinwire.plan import compute
from thinwire.plan.links import Links
from thinwire.plan.planner import Stopwatch
from thinwire.plan.workloads import of_recipe
from thinwire.report.records import read_records
from thinwire.report.runs import BASELINE

CALIBRATION = "calibration"
"""Folder of the calibration run."""
_STEPS = 40
# Between workers of one host: its loopback.
_FAST = {"fast_bandwidth": 10e9, "fast_latency": 15e-6}


@dataclass(frozen=True)
class Calibration:
    """The cost of a step and of a collective on this machine, apart from the bytes sent."""

    stopwatch: Stopwatch
    slowdown: float
    """A worker's step time while the others run, relative to running alone."""
    overhead: float
    """Seconds per collective, apart from its bytes."""

    def links(self, rate: float | None, probe: Probe) -> Links:
        """The links for a plan; an unshaped one has its measured rate."""
        bandwidth = rate or probe.bits_per_second / Links().payload
        return Links(bandwidth=bandwidth, latency=probe.latency_s, overhead=self.overhead, **_FAST)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"slowdown": self.slowdown, "overhead_s": self.overhead}


def calibrate(base: Job, lab: Hosts, say: Callable[[str], None]) -> Calibration:
    """Train a few steps over unshaped links, and measure their cost apart from the bytes."""
    lab.shape(None)
    probe = lab.probe()
    steps = min(_STEPS, base.trained.steps)
    job = replace(base, method=BASELINE, group_size=None, out=base.out / CALIBRATION, hosts=lab.specs())
    job = replace(job, steps=steps, eval_every=max(1, steps // 2))
    traffic = job.run(say)["traffic"]
    computing, waiting = _second_half(job)
    workload = of_recipe(base.trained, base.workers, base.data)
    slowdown = computing / compute.measure(workload).seconds
    moving = 8 * traffic["slow_bytes"] / steps / probe.bits_per_second
    overhead = max(0.0, waiting - moving) * steps / max(1, traffic["slow_calls"])
    return Calibration(Stopwatch(workload, slowdown=slowdown), slowdown, overhead)


def _second_half(job: Job) -> tuple[float, float]:
    """Seconds per step computing and waiting, without the first steps, which load data."""
    seen = [r["time"] for r in read_records(job.out / "records.jsonl") if r["kind"] == "evaluation"]
    sums = [{key: sum(row[key] for row in split.values()) for key in ("steps", "compute", "wire")} for split in seen]
    # The last evaluation is of the finished model; a run of one step has only that step.
    late, early = sums[-2], sums[0] if sums[0]["steps"] < sums[-2]["steps"] else dict.fromkeys(sums[0], 0.0)
    steps = late["steps"] - early["steps"]
    return (late["compute"] - early["compute"]) / steps, (late["wire"] - early["wire"]) / steps
