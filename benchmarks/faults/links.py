"""Links that fail while groups train: cut for some seconds or for good, slow, or the network in two parts.

    sudo python benchmarks/faults/links.py --methods localsgd:every=8,allreduce --out OUT

Five virtual hosts, four of them with a group that trains digits, the last with the store. Nobody is told that a link
is down: packets to the other side go to an address that no host has. A row says which groups came to the end, with
how many different models, and how long after the fault the others stopped, with the last line that they wrote.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch import Groups

from thinwire.netbench import namespaces
from thinwire.netbench.hosts import Hosts

NOWHERE = "02:00:0a:4d:00:ff"
STORE = 4
RATE = 100e6


class Fault(NamedTuple):
    """Hosts that others cannot reach, for how long; or a link that is slow."""

    away: tuple[int, ...]
    seconds: float | None
    """None is for good."""
    rate: float | None = None


FAULTS = {
    "none": Fault((), 0),
    "cut 5 s": Fault((1,), 5),
    "cut 60 s": Fault((1,), 60),
    "cut for good": Fault((1,), None),
    "store cut 5 s": Fault((STORE,), 5),
    "slow": Fault((1,), None, RATE / 10),
    "split 3 | 1": Fault((0,), None),
    "split 2 | 2, store with the first": Fault((2, 3), None),
    "split 2 | 2, store with the second": Fault((0, 1), None),
}


def main() -> None:
    given = arguments()
    wanted = given.faults.split(";") if given.faults else list(FAULTS)
    with Hosts(5, rate=RATE, name="faults") as hosts:
        for method in given.methods.split(","):
            for name in wanted:
                print(json.dumps(one(method, name, hosts, given)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="localsgd:every=8,allreduce")
    parser.add_argument("--faults", help="of " + "; ".join(FAULTS) + ", by semicolon")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--at", type=int, default=60, help="the step at which the link fails")
    parser.add_argument("--slow", type=float, default=0.1, help="seconds that each step takes longer")
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def one(method: str, name: str, hosts: Hosts, given: argparse.Namespace) -> dict[str, Any]:
    """A run with one fault."""
    kind, *fields = method.split(":")
    folder = given.out / f"{method}-{name}".translate(str.maketrans(": |,", "----"))
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", kind, "--steps", str(given.steps), "--slow", str(given.slow), "--timeout", str(given.timeout)]
    words += [word for field in fields for word in ("--set", field)]
    fault, ends = FAULTS[name], dict[int, float]()
    groups = Groups(4, folder, words, hosts.hosts)
    try:
        _wait(lambda: _at_least(groups, given.at), 300)
        start = time.monotonic()
        _apply(fault, hosts)
        while groups.running and time.monotonic() < start + 400:
            if fault.seconds is not None and time.monotonic() > start + fault.seconds:
                _mend(hosts)
                fault = fault._replace(seconds=None)
            for group in range(4):
                if group not in groups.running:
                    ends.setdefault(group, round(time.monotonic() - start, 1))
            time.sleep(0.1)
        hung = groups.running
    finally:
        groups.close()
        _mend(hosts)
    found = groups.results()
    finished = sorted(one["group"] for one in found)
    stopped = {g: {"after": ends.get(g), "said": groups.said(g)[:300]} for g in range(4) if g not in finished}
    row = {"method": method, "fault": name, "finished": finished, "models": len({one["digest"] for one in found})}
    seconds = max((ends.get(group, 0.0) for group in finished), default=None)
    lost = sorted({group for one in found for event in one["events"] for group in event.get("lost", [])})
    return row | {"hung": hung, "seconds": seconds, "lost": lost, "stopped": stopped}


def _apply(fault: Fault, hosts: Hosts) -> None:
    if fault.rate is not None:
        for index in fault.away:
            namespaces.hold(hosts.hosts[index].namespace, [hosts.hosts[index].interface], fault.rate)
            namespaces.hold(f"{hosts.hosts[index].namespace.rsplit('-', 1)[0]}-switch", [f"port{index}"], fault.rate)
        return
    near = [index for index in range(len(hosts.hosts)) if index not in fault.away]
    _address(hosts, [(a, b) for a in fault.away for b in near], lambda index: NOWHERE)


def _mend(hosts: Hosts) -> None:
    """All links as they were."""
    everyone = range(len(hosts.hosts))
    _address(hosts, [(a, b) for a in everyone for b in everyone if a < b], "02:00:0a:4d:00:{:02x}".format)
    hosts.shape(RATE)


def _address(hosts: Hosts, pairs: Sequence[tuple[int, int]], hardware: Callable[[int], str]) -> None:
    """Where frames between these hosts are sent, in both directions."""
    for a, b in [*pairs, *((b, a) for a, b in pairs)]:
        there = f"neigh replace {hosts.hosts[b].address} lladdr {hardware(b)} nud permanent"
        namespaces.run("ip", "-n", hosts.hosts[a].namespace, *there.split(), "dev", hosts.hosts[a].interface)


def _at_least(groups: Groups, step: int) -> bool:
    """Whether all groups have come to this step, or one has ended before."""
    found = [lines[-1][0] for lines in groups.steps().values() if lines]
    return len(groups.running) < 4 or (len(found) == 4 and min(found) >= step)


def _wait(is_true: Callable[[], bool], timeout: float) -> None:
    end = time.monotonic() + timeout
    while not is_true() and time.monotonic() < end:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
