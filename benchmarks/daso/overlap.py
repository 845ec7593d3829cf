"""Is DASO's overlap real? Steps with a transfer under way against the same steps without one, on links that are slow.

sudo python benchmarks/daso/overlap.py --json FILE            about 20 minutes on 2 cores
sudo python benchmarks/daso/overlap.py --quick                to see that it runs

Two hosts with two gloo workers of one thread each train a character GPT of 1.8 million parameters on noise. Every
variant is attached in the same processes and they take turns, block by block; who begins changes from round to round.
"Compute only" is LocalSGD that never averages: the same steps with the same gradients averaged inside the node. It has
two turns a round; ratios are to the mean of both, and its own show what noise alone gives.

A block begins with a cycle that is not timed and ends where a transfer has just been sent, as it began: what is timed
is whole cycles with what is due in each. Its time is from when the last worker begins it to when the last one is done.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from measure import load, machine, meets

import gang
import thinwire
from thinwire.base import units
from thinwire.netbench.hosts import Hosts, parse_rate
from thinwire.train.models import CharGPT

HOSTS, WORKERS = 2, 4
FOREVER = 10**9
ALONE = thinwire.LocalSGD(every=FOREVER)
TARGET = "<= 1.1"
VOCABULARY, CHARACTERS = 65, 64


@dataclass(frozen=True)
class Variant:
    """A method and the steps of its blocks."""

    name: str
    config: Any
    lead: int
    """Steps at the beginning that are not timed."""
    steps: int
    """Those that are."""
    every: int = 1
    """Steps from one transfer to the next."""
    wait: int = 0
    """S."""
    target: str = ""


@dataclass(frozen=True)
class Block:
    """What one worker saw of a block."""

    began: float
    ended: float
    """By the clock that all processes of a machine share."""
    processor: float
    """Seconds of its threads, gloo's too."""
    waited: dict[str, float]
    """Seconds in collectives, by purpose."""
    slow_bytes: int
    """What its node sent."""
    packets: float
    """Seconds that the machine's kernel spent on moving packets, which no process is charged for."""


def variants(every: int, cycles: int) -> list[Variant]:
    """What takes turns; what is to meet a target stands between two times of "compute only"."""
    whole = (every, cycles * every)
    often = (1, max(2, every))
    return [
        Variant("compute only", ALONE, *whole),
        Variant("DASO, S = B", _daso(every, every), *whole, every, every, TARGET),
        Variant("compute only, again", ALONE, *whole),
        Variant("DASO, S = 1", _daso(every, 1), *whole, every, 1),
        Variant("DASO, S = B, sharded", _daso(every, every, sharded=True), *whole, every, every),
        Variant("DASO, S = B, int8", _daso(every, every, wire="int8"), *whole, every, every),
        Variant("DASO, S = 0: it waits", _daso(every, 0), *whole, every),
        Variant("all-reduce, fp32", thinwire.AllReduce(), *often),
        Variant("all-reduce, bf16", thinwire.AllReduce(wire="bf16"), *often),
    ]


def _daso(every: int, wait: int, **more: Any) -> thinwire.DASO:
    """In its cycling phase from the first step to the last."""
    pinned = {"warmup": 0, "cooldown": 0, "plateau_patience": None}
    return thinwire.DASO(total_steps=FOREVER, every=every, overlap=wait, **pinned, **more)


def main() -> None:
    """Every rate; the table when it is through."""
    given = _arguments()
    print(", ".join(f"{key}: {value}" for key, value in machine("cpu").items()), flush=True)
    found = {"command": " ".join(sys.argv), "machine": machine("cpu"), "batch": given.batch, "rates": []}
    with Hosts(count=HOSTS, name="thinwireoverlap") as lab:
        for rate in given.rates.split(","):
            lab.shape(parse_rate(rate))
            probe, before = lab.probe(), load()
            chosen = [v for v in variants(given.every, given.cycles) if re.search(f"compute|{given.only}", v.name)]
            seen = gang.run(take_turns, WORKERS, chosen, given, timeout=7200, patience=300, hosts=lab.hosts)
            at = {"rate": parse_rate(rate), "probe_bits": probe.bits_per_second, "load": [before, load()]}
            at |= {"every": given.every, "rounds": given.rounds, "variants": list(rows(chosen, seen))}
            print(table(at), flush=True)
            found["rates"].append(at)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


def take_turns(rank: int, chosen: list[Variant], given: argparse.Namespace) -> list[list[Block]]:
    """A worker: for each variant its blocks, round by round."""
    torch.manual_seed(rank)
    x, y = (torch.randint(VOCABULARY, (given.batch, CHARACTERS)) for _ in range(2))
    trainers = [Trainer(variant, x, y) for variant in chosen]
    blocks: list[list[Block]] = [[] for _ in chosen]
    for trainer in trainers:
        trainer.run()  # buckets are rebuilt after the first step, and links find their rate
    for number in range(given.rounds):
        for i in range(len(trainers)):
            turn = (i + number) % len(trainers)
            blocks[turn].append(trainers[turn].run())
    return blocks


class Trainer:
    """One variant in one worker, with a model of its own."""

    def __init__(self, variant: Variant, x: torch.Tensor, y: torch.Tensor) -> None:
        self.variant, self.x, self.y = variant, x, y
        torch.manual_seed(0)
        model = CharGPT(vocabulary=VOCABULARY, block=CHARACTERS, width=192)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.replica = thinwire.attach(model, self.optimizer, variant.config)

    def run(self) -> Block:
        """One block; nothing of it is under way afterwards."""
        self.replica.wire.barrier("a block")
        for _ in range(self.variant.lead):
            self.step()
        traffic = self.replica.traffic
        processor, waited, sent, packets = time.process_time(), self._waited(), traffic.slow_bytes, _packet_time()
        began = time.perf_counter()
        for _ in range(self.variant.steps):
            self.step()
        ended = time.perf_counter()
        spent = {purpose: seconds - waited.get(purpose, 0.0) for purpose, seconds in self._waited().items()}
        processor, packets = time.process_time() - processor, _packet_time() - packets
        block = Block(began, ended, processor, spent, traffic.slow_bytes - sent, packets)
        if self.variant.wait:
            self.replica._method.state_dict()  # waits for what is under way
        return block

    def step(self) -> None:
        """As any loop has it."""
        loss = F.cross_entropy(self.replica(self.x).flatten(0, 1), self.y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _waited(self) -> dict[str, float]:
        return {purpose: row["seconds"] for purpose, row in self.replica.traffic.by_purpose.items()}


def _packet_time() -> float:
    """Seconds in soft interrupts, of all processors."""
    ticks = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return int(ticks[7]) / os.sysconf("SC_CLK_TCK")


def rows(chosen: list[Variant], seen: list[list[list[Block]]]) -> Iterator[dict[str, Any]]:
    """The figures of each variant; `seen` is by worker, variant and round."""
    by_variant = [list(zip(*(worker[i] for worker in seen), strict=True)) for i in range(len(chosen))]
    alone = [i for i, variant in enumerate(chosen) if variant.config == ALONE]
    for variant, rounds in zip(chosen, by_variant, strict=True):
        each = _steps(_seconds, rounds, variant)
        plain = _means(_steps(_seconds, by_variant[i], chosen[i]) for i in alone)
        ratios = _ratios(each, plain)
        busy = _ratios(_steps(_busy, rounds, variant), _means(_steps(_busy, by_variant[i], chosen[i]) for i in alone))
        yield {
            "name": variant.name,
            "config": repr(variant.config),
            "target": variant.target,
            "step_s": statistics.median(each),
            "ratio": statistics.median(ratios),
            "quartiles": _quartiles(ratios),
            "processor_ratio": statistics.median(busy),
            "processor_quartiles": _quartiles(busy),
            "processor_s": _per_step(variant, [[block.processor for block in blocks] for blocks in rounds]),
            "packets_s": _per_step(variant, [[block.packets for block in blocks] for blocks in rounds]),
            "waited_s": _waiting(variant, rounds),
            "transfer_bytes": variant.every * _per_step(variant, [[b.slow_bytes for b in blocks] for blocks in rounds]),
            "hidden_behind_s": variant.wait * statistics.median(plain),
            "blocks": [[asdict(block) for block in blocks] for blocks in rounds],
        }


def _steps(
    what: Callable[[tuple[Block, ...]], float], rounds: list[tuple[Block, ...]], variant: Variant
) -> list[float]:
    """Of one step, round by round."""
    return [what(blocks) / variant.steps for blocks in rounds]


def _means(series: Iterable[list[float]]) -> list[float]:
    return [statistics.fmean(each) for each in zip(*series, strict=True)]


def _seconds(blocks: tuple[Block, ...]) -> float:
    return max(block.ended for block in blocks) - max(block.began for block in blocks)


def _busy(blocks: tuple[Block, ...]) -> float:
    """Processor seconds of all workers, and of the kernel for their packets."""
    return sum(block.processor for block in blocks) + statistics.fmean(block.packets for block in blocks)


def _ratios(mine: list[float], alone: list[float]) -> list[float]:
    return [one / other for one, other in zip(mine, alone, strict=True)]


def _per_step(variant: Variant, rounds: list[list[float]]) -> float:
    """The median over rounds of the mean over workers."""
    return statistics.median(map(statistics.fmean, rounds)) / variant.steps


def _waiting(variant: Variant, rounds: list[tuple[Block, ...]]) -> dict[str, float]:
    purposes = sorted({purpose for blocks in rounds for block in blocks for purpose in block.waited})
    return {p: _per_step(variant, [[b.waited.get(p, 0.0) for b in blocks] for blocks in rounds]) for p in purposes}


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def table(at: dict[str, Any]) -> str:
    """Markdown, one line a variant."""
    link = f"{units.rate(at['rate'])} (a stream gets {at['probe_bits'] / 1e6:.0f} Mbit/s)" if at["rate"] else "unshaped"
    heading = f"### {link}, B = {at['every']}, {at['rounds']} rounds, load {at['load'][0]} to {at['load'][1]}"
    names = ["a step", "against compute only", "by processor time", "processor", "packets"]
    names += ["waited: gradients", "merge", "transfer", "hidden behind"]
    lines = [heading, "", f"| | {' | '.join(names)} |", f"| --- |{' --: |' * len(names)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(row, at))} |" for row in at["variants"]), ""])


def _cells(row: dict[str, Any], at: dict[str, Any]) -> list[str]:
    verdict = "" if not row["target"] else ", met" if meets(row["ratio"], row["target"]) else ", **missed**"
    ideal = 8e3 * row["transfer_bytes"] / (at["rate"] or at["probe_bits"])
    hidden = row["hidden_behind_s"]
    waited = row["waited_s"]
    return [
        row["name"],
        f"{1e3 * row['step_s']:.0f} ms",
        _with_spread(row["ratio"], row["quartiles"]) + verdict,
        _with_spread(row["processor_ratio"], row["processor_quartiles"]),
        f"{1e3 * row['processor_s']:.0f} ms",
        f"{1e3 * row['packets_s']:.0f} ms",
        f"{1e3 * waited.get('gradients', 0):.0f} ms",
        f"{1e3 * (waited.get('merge', 0) + waited.get('control', 0)):.1f} ms",
        f"{row['transfer_bytes'] / 1e6:.2f} MB, {ideal:.0f} ms" if row["transfer_bytes"] else "",
        f"{1e3 * hidden:.0f} ms" if hidden else "",
    ]


def _with_spread(middle: float, quartiles: list[float]) -> str:
    return f"{middle:.3f} [{quartiles[0]:.3f}, {quartiles[1]:.3f}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100Mbit,1Gbit", help="of each host's link, or unshaped, by commas")
    parser.add_argument("--batch", type=int, default=16, help="texts of 64 characters, a worker and step")
    parser.add_argument("--every", type=int, default=4, help="B")
    parser.add_argument("--cycles", type=int, default=2, help="cycles of B steps that are timed in a block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a pattern of variants beside compute only, such as 'S = B$'")
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there, with every block")
    given = parser.parse_args()
    if given.quick:
        given.rounds = 2
    return given


if __name__ == "__main__":
    main()
