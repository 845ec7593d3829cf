"""Run a recipe with several methods over shaped links, and compare the ledger with the kernel's counters.

A short all-reduce run over unshaped links calibrates plans to this machine. Then, for every rate, the plan is computed
first, and the methods run, one after the other, on the same hosts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from thinwire.base import units
from thinwire.comm.ledger import HEADERS
from thinwire.launch.jobs import Job, Variant
from thinwire.launch.launcher import HostSpec
from thinwire.netbench.hosts import Hosts, Probe, check
from thinwire.plan import compute
from thinwire.plan.forecast import Layout, Links
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.workload import of_recipe
from thinwire.report.records import read_records
from thinwire.report.runs import BASELINE
from thinwire.train.run_folder import locked, refuse_locked, refuse_occupied

RESULT = "netbench.json"
CALIBRATION = "calibration"
"""Folder of the calibration run."""
_STEPS = 40
# Between workers of one host: its loopback.
_FAST = {"fast_bandwidth": 10e9, "fast_latency": 15e-6}


class During(Protocol):
    """Shows what is done inside, or the job that runs there."""

    def __call__(self, what: str, job: Job | None = None) -> AbstractContextManager[Any]: ...


def nothing_shown(what: str, job: Job | None = None) -> AbstractContextManager[Any]:
    """Shows nothing."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to measure."""

    base: Job
    """The job, without a method."""
    variants: list[Variant]
    """The methods to run."""
    hosts: int
    """Number of hosts to create; workers are divided evenly."""
    rates: list[float | None]
    """Bits per second of each host's link; None is unshaped."""
    name: str
    """Prefix of the hosts' names."""
    keep: bool = False
    """Keep the hosts for inspection."""

    def check(self) -> None:
        """Raise for anything invalid, before anything is created."""
        check(self.hosts, self.name, max(1, self.base.workers // max(1, self.hosts)))
        for _, job in self.jobs("check", (HostSpec(),) * self.hosts):
            job.check()

    def refuse_occupied(self) -> None:
        """Raise if an earlier measurement would be overwritten."""
        result, calibration = self.base.out / RESULT, self.base.out / CALIBRATION
        jobs = [job for rate in self.rates for _, job in self.jobs(_label(rate), ())]
        for job in (*jobs, replace(self.base, out=calibration)):
            job.refuse_occupied()
        refuse_locked(self.base.out)
        if not self.base.overwrite:
            refuse_occupied(self.base.out, [result] if result.exists() else [])

    def jobs(self, rate: str, hosts: tuple[HostSpec, ...]) -> Iterator[tuple[Variant, Job]]:
        """One job per method."""
        for v in self.variants:
            out = self.base.out / rate.replace(" ", "").replace("/s", "") / v.folder
            yield v, replace(self.base, method=v.method, settings=v.settings, out=out, hosts=hosts)

    def run(self, say: Callable[[str], None], during: During = nothing_shown) -> dict[str, Any]:
        """Run everything; returns the content of `netbench.json`.

        What a user should know is passed to `say`; what takes long is done inside `during`.
        """
        self.refuse_occupied()
        self.check()
        found: dict[str, Any] = {"recipe": self.base.trained.name, "workers": self.base.workers, "hosts": self.hosts}
        found |= {"steps": self.base.trained.steps, "cores": os.cpu_count(), "rates": []}
        with Hosts(count=self.hosts, name=self.name, keep=self.keep) as lab, locked(self.base.out):
            with during("calibrating: a short run over unshaped links"):
                calibration = calibrate(self.base, lab, _own_lines(say))
            found["calibration"] = calibration.as_dict()
            for rate in self.rates:
                lab.shape(rate)
                found["rates"].append(self._at(rate, lab, calibration, say, during))
                (self.base.out / RESULT).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return found

    def _at(
        self, rate: float | None, lab: Hosts, known: Calibration, say: Callable[[str], None], during: During
    ) -> dict[str, Any]:
        probe = lab.probe()
        label = _label(rate)
        links = known.links(rate, probe)
        jobs = list(self.jobs(label, lab.specs()))
        layout = Layout(workers=self.base.workers, nodes=self.hosts)

        def planned(configs: dict[str, Any], ranks: Path | None = None) -> list[dict[str, Any]]:
            plan = make_plan(known.stopwatch.workload, configs, layout, links, stopwatch=known.stopwatch, ranks=ranks)
            return plan.as_dict()["methods"]

        with during(f"{label}: planning"):
            plans = planned({v.label: job.config for v, job in jobs})
        rows = []
        for number, ((v, job), row) in enumerate(zip(jobs, plans, strict=True), start=1):
            say(f"{label}, {v.label}: planned {units.time(row['seconds_per_step'])} per step")
            with during(f"{label}, {v.label} ({number} of {len(jobs)})", job):
                measured = _measured(job, lab, _own_lines(say))
            rows.append({"method": v.label, **measured, "planned": row})
            if row["slow_bytes_range"]:
                (rows[-1]["planned_with_ranks"],) = planned({v.label: job.config}, job.out)
        # Planned speed-ups are relative to this job too.
        usual = (job.method == BASELINE and job.config.wire == "fp32" for _, job in jobs)
        baseline = next((row["step_s"] for row, is_usual in zip(rows, usual, strict=True) if is_usual), None)
        for row in rows:
            row["speedup"] = baseline / row["step_s"] if baseline else None
        return {
            "rate": label,
            "rate_bits": rate,
            "probe_bits": probe.bits_per_second,
            "probe_latency_s": probe.latency_s,
            "methods": rows,
        }


def _label(rate: float | None) -> str:
    return units.rate(rate) if rate else "unshaped"


def _own_lines(say: Callable[[str], None]) -> Callable[[str], None]:
    """Only Thinwire's own lines; the error says why a job failed."""
    return lambda line: say(line) if line.startswith("thinwire:") else None


def _measured(job: Job, lab: Hosts, say: Callable[[str], None]) -> dict[str, Any]:
    """Run a job and read every host's counters before and after."""
    before, cpu_before = lab.counters(), _cpu_ticks()
    summary = job.run(say)
    after, cpu_after = lab.counters(), _cpu_ticks()
    phases = {name: _agreement(row) for name, row in summary["traffic"]["by_phase"].items()}
    return {
        "out": str(job.out),
        "steps": summary["steps"],
        "step_s": _seconds_per_step(job.out),
        "wall_s": summary["wall_s"],
        "time": summary["time"],
        "stolen": (cpu_after[1] - cpu_before[1]) / max(1, cpu_after[0] - cpu_before[0]),
        "traffic_vs_allreduce_fp32": summary["traffic_vs_allreduce_fp32"],
        "phases": phases,
        "whole": _sum(phases),
        # What each sent, from torchrun's first packet to its last.
        "hosts": [
            {"sent_bytes": ended.sent_bytes - began.sent_bytes, "sent_packets": ended.sent_packets - began.sent_packets}
            for began, ended in zip(before, after, strict=True)
        ],
    }


def _cpu_ticks() -> tuple[int, int]:
    """Total CPU ticks so far, and those stolen by other virtual machines."""
    ticks = [int(n) for n in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]]
    return sum(ticks[:8]), ticks[7]


def _agreement(row: dict[str, Any]) -> dict[str, Any]:
    """The ledger against the kernel: what remains after subtracting every packet's headers."""
    kernel, packets = row.get("kernel_bytes", 0), row.get("kernel_packets", 0)
    headers = HEADERS * packets
    return {
        "ledger_bytes": row["slow_bytes"],
        "kernel_bytes": kernel,
        "headers_bytes": headers,
        "left_bytes": kernel - headers - row["slow_bytes"],
        "resent_packets": row.get("kernel_resent", 0),
    }


def _sum(phases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    whole = {key: sum(row[key] for row in phases.values()) for key in next(iter(phases.values()))}
    whole["left_share"] = whole["left_bytes"] / whole["ledger_bytes"] if whole["ledger_bytes"] else None
    return whole


def _seconds_per_step(folder: Path) -> float:
    """From the end of the first step to the end of the last, including everything between."""
    steps = [r for r in read_records(folder / "records.jsonl") if r["kind"] == "step"]
    first, last = steps[0], steps[-1]
    if first is last:
        return first["wall_s"]
    return (last["wall_s"] - first["wall_s"]) / (last["step"] - first["step"])


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
