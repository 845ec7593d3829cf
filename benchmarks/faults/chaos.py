"""Random faults while groups train: do the others go on, how soon, with one model, and is anything saved ever lost?

    python benchmarks/faults/chaos.py --methods ab,localsgd:every=8 --seeds 0,1,2 --out OUT
    python benchmarks/faults/chaos.py --defaults --methods localsgd:every=8 --seeds 0,1 --out OUT
    python benchmarks/faults/chaos.py --table --out OUT

Four groups train digits and save every 25 steps. Faults come at random moments:

    kill         a group is killed, or a worker of it if it has several, and started again
    pause        a group is frozen with SIGSTOP for 1 to 30 s
    freeze       a group is frozen for good; after 40 s its launcher kills it and starts it again
    store        the store is killed, and started again on the same port after 0.2 to 10 s
    store-pause  the store is frozen for 1 to 10 s
    pause-all    all groups are frozen at once, for 1 to 30 s
    all          all groups are killed at once, and started again on the same store
    all+store    the store too

A group that ends with an error is started again, as a launcher would. OUT/rows.jsonl gets a line per fault and a line
per run; runs that it has already are skipped. The folder of a run in which something went wrong is kept, with the
stacks of processes that hung in GROUP.log.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from launch import Groups, Step

import thinwire

METHODS = "ab,localsgd:every=8,diloco:every=8,daso,oialr,topk,powersgd,onebit,allreduce,ab-paper"
KINDS = {"kill": 6, "pause": 4, "freeze": 2, "store": 3, "store-pause": 2, "pause-all": 1, "all": 2, "all+store": 1}
"""How often each fault is drawn."""
LENGTHS = {
    "kill": (0.2, 15),
    "pause": (1, 30),
    "freeze": (40, 40),
    "store": (0.2, 10),
    "all": (0.5, 5),
    "store-pause": (1, 10),
    "pause-all": (1, 30),
}
"""Seconds until a group goes on or is started again."""
ONE = ("kill", "pause", "freeze")
"""Faults that hit one group."""
PROMISED_S = 5.0
"""Seconds in which others notice that a group is gone."""
AGAIN_S = 0.5
"""Seconds after which a launcher starts a group again that has ended with an error."""
START_S = 60.0
"""Seconds in which the first workers import everything."""
_LOOK_S = 0.05
_MOST_DEATHS, _MOST_S = 24, 3600.0
"""A run with more deaths, or that takes longer, is ended."""
Steps = dict[str, list[Step]]


class Plan(NamedTuple):
    """A fault as it is drawn, before anybody knows who is there to be hit."""

    kind: str
    length: float
    wait: float
    """Seconds after the last fault, or after the others have gone on from it."""
    together: bool
    """Whether it comes before they have."""
    pick: float
    """Which of the groups, from 0 to 1."""


@dataclass
class Fault:
    """What was done, and what came of it."""

    plan: Plan
    groups: list[int]
    """Those that are hit; none if it is the store."""
    at: float
    step: int
    phase: str
    away: int
    """Other groups that were not back yet."""
    saved: int
    """The step of the newest complete save."""
    until: float | None = None
    """When the last of what was down went on or was started again."""
    hung: bool = False

    @property
    def is_whole(self) -> bool:
        return self.plan.kind.startswith("all")

    @property
    def is_outage(self) -> bool:
        """Whether nobody can be expected to go on before it has ended."""
        return self.is_whole or not self.groups


def main() -> None:
    given = arguments()
    path = given.out / "rows.jsonl"
    if given.table:
        print_tables([json.loads(line) for line in path.read_text().splitlines()])
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes are ended then as on any other way out
    given.out.mkdir(parents=True, exist_ok=True)
    there = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {_identity(row) for row in there if row["row"] == "run"}
    for seed in map(int, given.seeds.split(",")):
        for method in given.methods.split(","):
            about = {"method": method, "seed": seed, "timeout": given.timeout, "workers": given.workers}
            if _identity(about) not in done:
                rows = Run(about, given).rows()
                with path.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                print(json.dumps(rows[-1]), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--faults", type=int, default=6, help="at most so many in a run")
    parser.add_argument("--pause", type=float, default=5.0, help="mean seconds between two")
    parser.add_argument("--together", type=float, default=0.2, help="the share that comes before others have gone on")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1, help="in each group")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--slow", type=float, default=0.1, help="seconds that each step takes longer")
    parser.add_argument("--save-every", type=int, default=25, help="steps between two saves; 0 saves nothing")
    parser.add_argument("--timeout", type=float, default=12.0)
    parser.add_argument("--defaults", action="store_true", help="Faults() as it is, in place of `--timeout`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="print what OUT has, and run nothing")
    given = parser.parse_args()
    if unknown := set(given.kinds.split(",")) - KINDS.keys():
        parser.error(f"`--kinds` {', '.join(sorted(unknown))}: choose of {', '.join(KINDS)}")
    if given.defaults:
        given.timeout = thinwire.Faults().timeout
    return given


def plans(seed: str, given: argparse.Namespace) -> Iterator[Plan]:
    rng, kinds = random.Random(seed), given.kinds.split(",")
    for _ in range(given.faults):
        [kind] = rng.choices(kinds, [KINDS[kind] for kind in kinds])
        length = rng.uniform(*LENGTHS[kind.partition("+")[0]])
        yield Plan(kind, length, rng.expovariate(1 / given.pause), rng.random() < given.together, rng.random())


class Run:
    """One run, and what is done to it; every wait in it is bounded."""

    def __init__(self, about: dict[str, Any], given: argparse.Namespace) -> None:
        self.about, self.given = about, given
        self.folder = given.out / f"{about['method'].replace(':', '-')}-seed{about['seed']}-{about['timeout']:g}s"
        shutil.rmtree(self.folder, ignore_errors=True)
        name, *fields = about["method"].split(":")
        words = ["--method", name, "--steps", str(given.steps), "--slow", str(given.slow), "--seed", str(about["seed"])]
        words += ["--save-every", str(given.save_every), "--timeout", str(given.timeout)]
        words += ["--defaults"] if given.defaults else []
        words += [word for field in fields for word in ("--set", field)]
        self.plans = list(plans(f"{about['method']} {about['seed']}", given))
        self.faults: list[Fault] = []
        self.pending: list[tuple[float, int | None, Callable[[], None]]] = []
        """What happens next, when, and to which group; None is the store."""
        self.frozen: set[int] = set()
        self.deaths: list[tuple[float, int, str]] = []
        """Groups that ended with an error: when, which, and what they said."""
        self.begun: list[tuple[float, int, int]] = []
        """When a group was started, which, and the newest save then."""
        self.ended = ""
        self.start = time.time()
        self.event = self.start + START_S
        """When something was last done to the run."""
        self.groups = Groups(given.groups, self.folder, words, workers=given.workers)
        self.begun += [(self.start, group, 0) for group in range(given.groups)]

    def rows(self) -> list[dict[str, Any]]:
        """Train to the end, and say what happened."""
        try:
            while not self.ended:
                time.sleep(_LOOK_S)
                self._act()
                self._start_again()
                self._disturb()
                self.ended = self._end()
        finally:
            self.groups.close()
        steps, found = self.groups.steps(), self.groups.results()
        rows = [self._fault_row(number, fault, steps) for number, fault in enumerate(self.faults)]
        rows.append(self._run_row(steps, found))
        rows[-1]["well"] &= not any(row["others died"] or row["hung"] for row in rows[:-1])
        if rows[-1]["well"]:
            shutil.rmtree(self.folder)
        return rows

    # While it runs.

    def _act(self) -> None:
        """Do what is due."""
        due = [action for action in self.pending if action[0] <= time.time()]
        self.pending = [action for action in self.pending if action not in due]
        for _, _, act in due:
            act()
            self.event = time.time()

    def _start_again(self) -> None:
        """Start what has ended with an error, as a launcher would; not when the run is over."""
        if self.groups.store.poll() is not None and not any(group is None for _, group, _ in self.pending):
            self._later(AGAIN_S, None, self.groups.start_store)
        finished, awaited = self._finished, {group for _, group, _ in self.pending}
        for group in set(range(self.given.groups)) - set(self.groups.running) - finished - awaited:
            if finished and group in {group for _, group, _ in self.deaths}:
                continue
            self.groups.kill(group)
            self.deaths.append((time.time(), group, self.groups.said(group)[:300]))
            if not finished:
                self._later(AGAIN_S, group, lambda group=group: self._start(group))

    def _disturb(self) -> None:
        """Begin the next fault if its time has come."""
        if not self.plans or self._finished:
            return
        plan, steps = self.plans[0], self.groups.steps()
        away = {group for fault in self.faults if back(fault, steps) is None for group in fault.groups}
        there = [group for group in self.groups.running if group not in away and self._current(group, steps)]
        if len(there) + len(away) < self.given.groups or not self._is_due(plan, steps):
            return
        if plan.kind in ONE and len(away) + 1 > self.given.groups // 2:
            return  # fewer than half would be left
        del self.plans[0]
        last = max((lines[-1] for lines in steps.values() if lines), key=lambda step: step.time)
        store_is_down = any(group is None for _, group, _ in self.pending)
        if plan.kind not in ONE and (store_is_down or last.number > 0.95 * self.given.steps):
            return  # nor can groups be killed that may have finished
        hit = [there[int(plan.pick * len(there))]] if plan.kind in ONE else []
        hit = list(range(self.given.groups)) if plan.kind.startswith("all") else hit
        self._begin(Fault(plan, hit, time.time(), last.number, last.phase, len(away - set(hit)), self._saved()))

    def _begin(self, fault: Fault) -> None:
        self.faults.append(fault)
        acts = {"kill": self._kill, "pause": self._pause, "freeze": self._freeze, "store": self._store}
        acts |= {"store-pause": self._pause_store, "pause-all": self._pause_all}
        acts.get(fault.plan.kind, self._all)(fault)
        self.event = time.time()

    def _is_due(self, plan: Plan, steps: Steps) -> bool:
        """Whether it is time for it: after the others have gone on from the last one, unless both come together."""
        if not self.faults:
            return time.time() > self.start + 2 + plan.wait
        last = self.faults[-1]
        if plan.together and not last.is_whole and not plan.kind.startswith("all"):
            return time.time() > last.at + min(plan.wait, 3.0)
        since, until = went_on(last, steps), last.until if last.is_outage else last.at
        return since is not None and until is not None and time.time() > max(since, until) + plan.wait

    def _kill(self, fault: Fault) -> None:
        [group] = fault.groups
        self.groups.kill(group, int(fault.plan.pick * 1000) % self.given.workers)
        self._later(fault.plan.length, group, lambda: self._up(fault, group))

    def _pause(self, fault: Fault) -> None:
        [group] = fault.groups
        self.frozen.add(group)
        self.groups.signal(group, signal.SIGSTOP)

        def thaw() -> None:
            self.frozen.discard(group)
            self.groups.signal(group, signal.SIGCONT)
            fault.until = time.time()

        self._later(fault.plan.length, group, thaw)

    def _freeze(self, fault: Fault) -> None:
        [group] = fault.groups
        self.frozen.add(group)
        self.groups.signal(group, signal.SIGSTOP)

        def end() -> None:
            self.groups.kill(group)
            self._up(fault, group)

        self._later(fault.plan.length, group, end)

    def _store(self, fault: Fault) -> None:
        self.groups.kill_store()
        self._later(fault.plan.length, None, lambda: self._store_up(fault))

    def _pause_store(self, fault: Fault) -> None:
        os.kill(self.groups.store.pid, signal.SIGSTOP)

        def thaw() -> None:
            os.kill(self.groups.store.pid, signal.SIGCONT)
            fault.until = time.time()

        self._later(fault.plan.length, None, thaw)

    def _pause_all(self, fault: Fault) -> None:
        now = set(self.groups.running) - self.frozen
        self.frozen |= now
        for group in now:
            self.groups.signal(group, signal.SIGSTOP)

        def thaw() -> None:
            self.frozen -= now
            for group in now:
                self.groups.signal(group, signal.SIGCONT)
            fault.until = time.time()

        self._later(fault.plan.length, None, thaw)

    def _all(self, fault: Fault) -> None:
        store = fault.plan.kind == "all+store"
        self.pending = [action for action in self.pending if action[1] is None and not store]
        self.groups.kill_all(store=store)
        for earlier in self.faults:  # what was to be done for them is done now, or was taken from `pending`
            earlier.until = earlier.until or time.time()
        fault.until = None
        fault.saved = self._saved()  # one may have been completed just before
        if store:
            self._later(fault.plan.length / 2, None, lambda: self._store_up(fault))
        for group in fault.groups:  # launchers are not quite as fast as one another
            self._later(fault.plan.length + group * fault.plan.pick, group, lambda group=group: self._up(fault, group))

    def _up(self, fault: Fault, group: int) -> None:
        self._start(group)
        fault.until = time.time()

    def _store_up(self, fault: Fault) -> None:
        self.groups.start_store()
        fault.until = time.time()

    def _start(self, group: int) -> None:
        self.frozen.discard(group)
        self.begun.append((time.time(), group, self._saved()))
        self.groups.start(group)

    def _later(self, seconds: float, group: int | None, act: Callable[[], None]) -> None:
        self.pending.append((time.time() + seconds, group, act))

    # Its end.

    def _end(self) -> str:
        """Say why it is over; nothing while it is not."""
        alive = {group for group, own in self.groups.processes.items() if any(each.poll() is None for each in own)}
        waiting = alive | {group for _, group, _ in self.pending if group is not None}
        if self._finished:
            waiting -= {group for group in self.frozen if self._is_frozen_for_good(group)}
        if not waiting:
            return "finished" if self._finished else "died"
        if len(self.deaths) > _MOST_DEATHS:
            return "died"
        steps = self.groups.steps()
        quiet = [group for group in self.groups.running if group not in self.frozen and self._is_quiet(group, steps)]
        if quiet or time.time() > self.start + _MOST_S:
            self._note_hang(quiet)
            return "hung"
        return ""

    def _is_frozen_for_good(self, group: int) -> bool:
        return any(fault.plan.kind == "freeze" and fault.groups == [group] for fault in self.faults)

    def _is_quiet(self, group: int, steps: Steps) -> bool:
        """Whether it has averaged nothing for longer than any wait may take, though nothing was done to the run."""
        averages = [step.time for step in self._current(group, steps) if step.averages]
        began = max(at for at, which, _ in self.begun if which == group)
        ends = [path.stat().st_mtime for path in self.folder.glob("*.json")]
        since = max([self.event, began, *averages[-1:], *ends])
        return time.time() > since + 2 * self.given.timeout + round_seconds(steps)

    def _note_hang(self, quiet: list[int]) -> None:
        for fault in self.faults[-1:]:
            fault.hung = True
        for group in quiet:
            self.groups.signal(group, signal.SIGUSR1)
            self.deaths.append((time.time(), group, "hangs"))
        time.sleep(1.0)  # in which stacks are written

    @property
    def _finished(self) -> set[int]:
        """Groups that came to the end."""
        return {int(path.name.partition("-")[0]) for path in self.folder.glob("*.json")}

    def _saved(self) -> int:
        """Return the step of the newest complete save."""
        found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in self.folder.glob("saves/*/manifest.json"))
        return max((int(name[1]) for name in found if name), default=0)

    def _current(self, group: int, steps: Steps) -> list[Step]:
        """Return the lines of the group's present process, by its first worker."""
        return steps.get(f"{group}-{self.groups.processes[group][0].pid}", [])

    # What came of it.

    def _fault_row(self, number: int, fault: Fault, steps: Steps) -> dict[str, Any]:
        on, again = went_on(fault, steps), back(fault, steps)
        end = self.faults[number + 1].at if number + 1 < len(self.faults) else self._last_moment(steps)
        ups = [each.until - fault.at for each in self.faults[: number + 1] if each.until and each.is_outage]
        down = max([0.0, *ups]) + round_seconds(steps)
        limit, most = down + PROMISED_S + self.given.timeout / 3, down + 2 * self.given.timeout
        longest = gap(fault, steps, end)
        others = [death for death in self.deaths if fault.at < death[0] < end and not self._was_away(death, steps)]
        row = {"row": "fault", **self.about, "number": number, "kind": fault.plan.kind, "groups": fault.groups}
        row |= {"step": fault.step, "phase": fault.phase, "length": round(fault.plan.length, 2), "away": fault.away}
        row |= {"seconds": _since(fault, on), "back": _since(fault, again), "gap": longest}
        row |= {"limit": round(limit, 1), "late": longest > limit}
        row |= {"hung": fault.hung or longest > most, "saved": fault.saved, "others died": len(others)}
        return row | {"said": sorted({said for _, _, said in others})[:2]}

    def _run_row(self, steps: Steps, found: list[dict[str, Any]]) -> dict[str, Any]:
        lost = self._lost_saves(steps)
        models, left = len({one["digest"] for one in found}), len(self.groups.running)
        row = {"row": "run", **self.about, "faults": len(self.faults), "ended": self.ended, "finished": len(found)}
        row |= {"models": models, "accuracy": [round(one["accuracy"], 4) for one in found]}
        row |= {"lost saves": lost, "deaths": len(self.deaths), "left behind": left}
        row |= {"said": sorted({said for _, _, said in self.deaths})[:3], "seconds": round(time.time() - self.start)}
        return row | {"well": self.ended == "finished" and models == 1 and not lost and not left}

    def _was_away(self, death: tuple[float, int, str], steps: Steps) -> bool:
        """Whether a fault had hit the group that ended, and it was not back yet."""
        at, group, _ = death
        own = [fault for fault in self.faults if group in fault.groups and fault.at < at]
        return any((again := back(fault, steps)) is None or at < again for fault in own)

    def _last_moment(self, steps: Steps) -> float:
        """Return when groups last averaged; where they hang, now."""
        averages = [step.time for lines in steps.values() for step in lines if step.averages]
        return max(averages, default=self.start) if self.ended == "finished" else time.time()

    def _lost_saves(self, steps: Steps) -> int:
        """Count groups that began before the newest save of the time at which they were started."""
        lost = 0
        for at, group, saved in self.begun:
            firsts = [lines[0] for name, lines in steps.items() if lines and name.startswith(f"{group}-")]
            after = min((step for step in firsts if step.time > at), key=lambda step: step.time, default=None)
            lost += after is not None and after.number < saved
        return lost


def went_on(fault: Fault, steps: Steps) -> float | None:
    """Return when a group that was not hit had averaged again; any group where all were hit."""
    found = []
    for name, lines in steps.items():
        if lines and (lines[0].time > fault.at if fault.is_whole else int(name.partition("-")[0]) not in fault.groups):
            earlier = [step for step in lines if step.time <= fault.at]
            regrouped = (step for step in lines if earlier and step.changes > earlier[-1].changes and step.averages)
            found += [step.time for step in (next(regrouped, None), averaged_after(fault.at, lines)) if step]
            if fault.until is not None and fault.until > fault.at:
                found += [step.time for step in lines if step.averages and step.time > fault.until][:1]
    return min(found, default=None)


def back(fault: Fault, steps: Steps) -> float | None:
    """Return when all groups that were hit had averaged with the others again; any group, where it was the store."""
    if fault.until is None:
        return None
    found = []
    for hit in [{str(group)} for group in fault.groups] or [{name.partition("-")[0] for name in steps}]:
        own = [lines for name, lines in steps.items() if name.partition("-")[0] in hit]
        since = [step.time for lines in own if (step := averaged_after(fault.until, lines, fresh=True))]
        found.append(min(since, default=None))
    return None if None in found else max(found)


def averaged_after(at: float, lines: list[Step], *, fresh: bool = False) -> Step | None:
    """Return the first average in a step that began after this time.

    One that began before may have had all it needed already. The first step of a process counts if that is `fresh`.
    """
    if fresh and lines and lines[0].time > at and lines[0].averages:
        return lines[0]
    return next((step for last, step in itertools.pairwise(lines) if step.averages and last.time > at), None)


def gap(fault: Fault, steps: Steps, end: float) -> float:
    """Return the longest time in which nobody averaged, from the fault on."""
    times = sorted(step.time for lines in steps.values() for step in lines if step.averages)
    times = [fault.at, *(at for at in times if fault.at < at <= end), end]
    return round(max(after - before for before, after in itertools.pairwise(times)), 2)


def round_seconds(steps: Steps) -> float:
    """Return how long groups train between two averages, at most."""
    lengths, seconds = [1], [0.2]
    for lines in steps.values():
        at = [step.number for step in lines if step.averages]
        lengths += [after - before for before, after in itertools.pairwise(at)]
        seconds += [after.time - before.time for before, after in itertools.pairwise(lines)]
    return max(lengths) * statistics.median(seconds)


def _since(fault: Fault, at: float | None) -> float | None:
    return None if at is None else round(at - fault.at, 2)


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("method", "seed", "timeout", "workers"))


# Tables.


def print_tables(rows: list[dict[str, Any]]) -> None:
    for timeout in sorted({row["timeout"] for row in rows}):
        own = [row for row in rows if row["timeout"] == timeout]
        runs = [row for row in own if row["row"] == "run"]
        print(f"\n`timeout` {timeout:g} s: {len(runs)} runs, {sum(row['faults'] for row in runs)} faults; ", end="")
        print(f"{sum(row['ended'] == 'hung' for row in runs)} hung, ", end="")
        print(f"{sum(row['ended'] == 'died' for row in runs)} ended with an error, ", end="")
        print(f"{sum(row['models'] > 1 for row in runs)} ended with more than one model, ", end="")
        print(f"{sum(row['lost saves'] for row in runs)} saves lost\n")
        print("| fault | number | hung | later than promised | others ended | going on: median, 90 %, max | back |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        by_kind = defaultdict(list)
        for row in (row for row in own if row["row"] == "fault"):
            by_kind[row["kind"]].append(row)
        for kind in [kind for kind in KINDS if kind in by_kind]:
            print(_table_row(kind, by_kind[kind]))


def _table_row(kind: str, rows: list[dict[str, Any]]) -> str:
    counts = [sum(bool(row[name]) for row in rows) for name in ("hung", "late", "others died")]
    cells = [kind, len(rows), *counts, _spread(rows, "seconds"), _spread(rows, "back")]
    return "| " + " | ".join(map(str, cells)) + " |"


def _spread(rows: list[dict[str, Any]], name: str) -> str:
    """Return the median, the ninth decile and the largest."""
    found = sorted(row[name] for row in rows if row[name] is not None)
    if not found:
        return ""
    at = (found[len(found) // 2], found[min(len(found) - 1, int(0.9 * len(found)))], found[-1])
    return ", ".join(f"{seconds:.1f}" for seconds in at) + " s"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
