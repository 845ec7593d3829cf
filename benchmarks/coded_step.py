"""A step with coded gradients against the longer of computing and sending: is the exchange hidden, at what cost?

sudo python benchmarks/coded_step.py --rate 1Gbit            about 5 minutes on 2 cores

Two hosts with one gloo worker of one thread each train VGG16-BN. Every variant is attached in the same processes and
they take turns, step by step. "Compute" is LocalSGD that never averages; "wire" is the ledger's bytes of a step at the
link's rate. Processor time is that of the whole process, its background thread and gloo's included.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import load, machine

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import gang
import thinwire
from thinwire.experiments.models import VGG16BN
from thinwire.netbench.hosts import Hosts, parse_rate

VARIANTS: dict[str, Any] = {
    "compute": thinwire.LocalSGD(every=10**9),
    "int8": thinwire.AllReduce(wire="int8"),
    "int4": thinwire.AllReduce(wire="int4"),
    "int2": thinwire.AllReduce(wire="int2"),
    "bit": thinwire.AllReduce(wire="bit"),
    "lowrank:4": thinwire.AllReduce(wire="lowrank:4"),
    "topk:0.01": thinwire.AllReduce(wire="topk:0.01"),
    "fp32 (DDP)": thinwire.AllReduce(),
}


def main() -> None:
    """One table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1Gbit")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    before = load()
    with Hosts(count=2, name="thinwirecoded") as lab:
        lab.shape(parse_rate(given.rate))
        seen = gang.run(take_turns, 2, given.batch, given.rounds, timeout=3600, patience=300, hosts=lab.hosts)
    rows = [row(name, seen, parse_rate(given.rate)) for name in VARIANTS]
    print("| code | step s | compute s | wire s | step / longer | processor of a step / of computing |")
    print("| --- | --- | --- | --- | --- | --- |")
    for r in rows:
        seconds = " | ".join(f"{r[what]:.3f}" for what in ("step", "compute", "wire"))
        print(f"| {r['code']} | {seconds} | {r['ratio']:.2f} | {r['cost']:.2f} |")
    where = machine("cpu") | {"load_before": before, "load_after": load(), "rate": given.rate, "batch": given.batch}
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    if given.json:
        given.json.write_text(json.dumps({"machine": where, "rows": rows}, indent=1) + "\n")


def row(name: str, seen: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """Medians over rounds of the slower worker."""
    step, alone = (
        statistics.median(max(worker[which]["clock"][i] for worker in seen) for i in range(len(seen[0][name]["clock"])))
        for which in (name, "compute")
    )
    used, plain = (
        statistics.median(t for worker in seen for t in worker[which]["processor"]) for which in (name, "compute")
    )
    wire = 8 * seen[0][name]["bytes"] / rate
    times = {"step": step, "compute": alone, "wire": wire}
    return {"code": name, **times, "ratio": step / max(alone, wire), "cost": used / plain}


def take_turns(rank: int, batch: int, rounds: int) -> dict[str, Any]:
    """What one worker saw of each variant."""
    torch.manual_seed(rank)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    trainers = {name: Trainer(config) for name, config in VARIANTS.items()}
    for _ in range(2):  # buffers, links, and how often each gradient arrives
        for trainer in trainers.values():
            trainer.step(x, y)
    found = {name: {"clock": [], "processor": [], "bytes": 0} for name in VARIANTS}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            clock, processor, sent = trainer.step(x, y)
            found[name]["clock"].append(clock)
            found[name]["processor"].append(processor)
            found[name]["bytes"] = sent
    return found


class Trainer:
    """One variant, with a model of its own."""

    def __init__(self, config: Any) -> None:
        self.model = VGG16BN()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.replica = thinwire.attach(self.model, self.optimizer, config)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, int]:
        """Seconds by the clock, of the processor, and bytes."""
        self.replica.wire.barrier("a step")
        sent, start, used = self.replica.traffic.slow_bytes, time.perf_counter(), time.process_time()
        loss = F.cross_entropy(self.replica(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start, time.process_time() - used, self.replica.traffic.slow_bytes - sent


if __name__ == "__main__":
    main()
