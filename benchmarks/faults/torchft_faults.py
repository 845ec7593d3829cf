"""Faults while groups train by torchft: how soon do the others complete an average again?

    python benchmarks/faults/torchft_faults.py --python ENVIRONMENT/bin/python --faults 12 --out OUT

ENVIRONMENT is one in which torchft 0.2.0 is installed; nothing of Thinwire needs to be. Three replica groups of one
process train digits on gloo and average after every eight steps; manager and lighthouse have their defaults. A random
group is killed, frozen for good, or frozen for 1 to 30 s, at a random moment or in its next average, and started again
when the others have gone on. A random moment may lie in an average too: the phase is what the log shows.

OUT/torchft.json gets the rows: seconds from the fault to the first average that a group that was not hit completed in
a step that it began afterwards, or with other groups than before; None is a hang.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from chaos import Fault, Plan, back, gap, went_on
from launch import Groups, Process

SCRIPT = Path(__file__).parent / "torchft_group.py"
LENGTHS = {"kill": 0.0, "pause": 30.0, "freeze": 0.0}
_END_S = 30.0
"""Seconds in which a group comes to an average, and so to a fault in it, while nothing is wrong."""


class TorchftGroups(Groups):
    """Replica groups of torchft, with a lighthouse in place of a store."""

    def __init__(self, count: int, out: Path, words: Iterable[str], python: Path) -> None:
        self.python = python
        super().__init__(count, out, words)

    def start_store(self) -> None:
        words = ["--min_replicas", "2", "--bind", f"[::]:{self.port}"]
        program = str(self.python.parent / "torchft_lighthouse")
        self.store: Process = self._process((), "lighthouse", words, {}, program)

    def start(self, group: int) -> None:
        words = [str(SCRIPT), "--out", str(self.out), "--group", str(group), *self.words]
        words += ["--lighthouse", f"http://localhost:{self.port}"]
        self.processes[group] = [self._process((), f"{group}", words, {}, str(self.python))]


def main() -> None:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "torchft.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    for method in given.methods.split(","):
        plans = list(drawn(f"{method} {given.seed}", given))
        while number := len([row for row in rows if row["method"] == method]) + 1:
            if number > len(plans):
                break
            rows += disturbed(method, plans[number - 1 :], given)
            path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="an interpreter that has torchft")
    parser.add_argument("--methods", default="localsgd,diloco")
    parser.add_argument("--kinds", default=",".join(LENGTHS))
    parser.add_argument("--faults", type=int, default=12, help="for each method")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--slow", type=float, default=0.1, help="seconds that each step takes longer")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which nobody goes on any more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def drawn(seed: str, given: argparse.Namespace) -> Iterable[tuple[Plan, str]]:
    """Yield faults and where they hit, all kinds in turn."""
    rng, kinds = random.Random(seed), given.kinds.split(",")
    for number in range(given.faults):
        kind = kinds[number % len(kinds)]
        length = rng.uniform(1.0, max(1.0, LENGTHS[kind]))
        moment = "in an average" if number // len(kinds) % 2 else "at random"
        yield Plan(kind, length, rng.uniform(1.0, 3.0), False, rng.random()), moment


def disturbed(method: str, plans: list[tuple[Plan, str]], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Do one fault after the other until one of them stops everything; every wait is bounded."""
    folder = given.out / f"torchft-{method}"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", method, "--every", str(given.every), "--slow", str(given.slow)]
    groups, rows = TorchftGroups(given.groups, folder, words, given.python), list[dict[str, Any]]()
    try:
        for plan, moment in plans:
            since = time.time()
            if not _wait(groups, given.limit, lambda since=since: _all_average(groups, since)):
                break
            time.sleep(plan.wait)
            rows.append({"method": method} | one(plan, moment, groups, given))
            print(json.dumps(rows[-1]), flush=True)
            if rows[-1]["hung"]:
                break
    finally:
        groups.close()
    return rows or [{"method": method, "kind": "start", "hung": True}]


def one(plan: Plan, moment: str, groups: TorchftGroups, given: argparse.Namespace) -> dict[str, Any]:
    """Hit a group, wait until the others go on and the group is back."""
    group, limit, ended = int(plan.pick * groups.count), given.limit, list[int]()
    own = f"{group}-{groups.processes[group][0].pid}"
    at = _hit(plan, moment, group, groups)
    last = [step for step in groups.steps()[own] if step.time < at][-1]
    averages = last.number % given.every == given.every - 1 and at > last.time + given.slow
    fault = Fault(plan, [group], at, last.number, "in an average" if averages else "between averages", 0, 0)

    def goes_on() -> bool:
        if plan.kind == "pause" and fault.until is None and time.time() > fault.at + plan.length:
            groups.signal(group, signal.SIGCONT)
            fault.until = time.time()
        return went_on(fault, groups.steps()) is not None

    on = _wait(groups, limit, goes_on, ended, spared=group)
    if plan.kind == "pause":
        _wait(groups, plan.length, lambda: goes_on() and fault.until is not None, ended, spared=group)
    else:
        groups.kill(group)
        groups.start(group)
        fault.until = time.time()
    is_back = on and _wait(groups, limit, lambda: back(fault, groups.steps()) is not None, ended)
    steps = groups.steps()
    seconds, again = (_since(fault, at) for at in (went_on(fault, steps), back(fault, steps)))
    length = round(plan.length, 1) if plan.kind == "pause" else None
    row = {"kind": plan.kind, "moment": moment, "phase": fault.phase, "length": length}
    row |= {"seconds": seconds, "back": again, "gap": gap(fault, steps, time.time())}
    return row | {"hung": not on, "is back": is_back, "ended with an error": ended}


def _hit(plan: Plan, moment: str, group: int, groups: TorchftGroups) -> float:
    """Do it, now or in the group's next average; return when it was."""
    if moment == "at random":
        at = time.time()
        groups.signal(group, signal.SIGKILL if plan.kind == "kill" else signal.SIGSTOP)
        return at
    groups.signal(group, signal.SIGUSR1 if plan.kind == "kill" else signal.SIGUSR2)
    path = groups.out / f"{group}-{groups.processes[group][0].pid}.fault"
    end = time.monotonic() + _END_S
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()):
            path.unlink()
            return float(text)
        time.sleep(0.005)
    raise SystemExit(f"group {group} has not come to an average within {_END_S:g} s")


def _all_average(groups: TorchftGroups, since: float) -> bool:
    lines = groups.steps()
    own = [lines.get(f"{group}-{own[0].pid}", []) for group, own in groups.processes.items()]
    return all(sum(step.averages and step.time > since for step in steps) >= 2 for steps in own)


def _wait(
    groups: TorchftGroups,
    limit: float,
    is_true: Callable[[], bool],
    ended: list[int] | None = None,
    spared: int | None = None,
) -> bool:
    """Wait for something, and start groups again that end with an error meanwhile; note which."""
    end = time.monotonic() + limit
    while not (found := is_true()) and time.monotonic() < end:
        for group in set(groups.processes) - set(groups.running) - {spared}:
            if ended is not None:
                ended.append(group)
            groups.start(group)
        time.sleep(0.05)
    return found


def _since(fault: Fault, at: float | None) -> float | None:
    return None if at is None else round(at - fault.at, 2)


if __name__ == "__main__":
    main()
