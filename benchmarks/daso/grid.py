"""B × S: how accurate and how fast DASO is by how seldom it averages and how late (dissertation, Table 3.1, in small).

sudo python benchmarks/daso/grid.py --out runs/daso-grid            about 25 minutes on 2 cores
python benchmarks/daso/grid.py --out runs/daso-plain --plain        on plain workers: accuracy and bytes, no seconds

Two hosts with two gloo workers each over a slow link, warm-up and cool-down of 4 of the recipe's 30 epochs, B and S
pinned. Every finished run is kept in OUT/grid.json, and those that are there are not run again. Prints a table and
draws OUT/grid.png. Seconds are those of the training steps, the median over seeds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from thinwire import units
from thinwire.jobs import Job
from thinwire.launch import HostSpec
from thinwire.netbench.calibrate import host_specs
from thinwire.netbench.hosts import Hosts, parse_rate
from thinwire.recipes import named
from thinwire.report.plots import blank, dress, strokes
from thinwire.report.records import read_records
from thinwire.report.tables import figure, ratio

HOSTS, WORKERS = 2, 4
KINDS = {"S = 0": lambda b: 0, "S = 1": lambda b: 1, "S = B": lambda b: b}
"""How S goes with B: one line each in the picture, and one more where what comes late is compensated."""


class Cell(NamedTuple):
    """One place of the grid; all-reduce has neither B nor S."""

    skips: int = 0
    wait: int = 0
    compensated: bool = False

    @property
    def name(self) -> str:
        return f"B={self.skips} S={self.wait}{' compensated' * self.compensated}" if self.skips else "allreduce"

    @property
    def settings(self) -> tuple[str, ...]:
        pinned = ("warmup_epochs=4", "cooldown_epochs=4", "plateau_patience=none")
        own = (f"max_skips={self.skips}", f"wait={self.wait}", f"compensate={str(self.compensated).lower()}")
        return (*own, *pinned) if self.skips else ()


def cells(skips: list[int], compensate: bool) -> list[Cell]:
    """All-reduce, then every B with each S there is for it."""
    found = [Cell()]
    for b in skips:
        for s in sorted({kind(b) for kind in KINDS.values()}):
            found += [Cell(b, s), *([Cell(b, s, True)] if compensate and s else [])]
    return found


def main() -> None:
    """Run what is missing, then table and picture."""
    given = _arguments()
    recipe = named(given.recipe, steps=given.steps)
    about = {"recipe": given.recipe, "steps": recipe.steps, "rate": None if given.plain else given.rate}
    found = _kept(given.out / "grid.json", about)
    chosen = cells([int(b) for b in given.skips.split(",")], given.compensate)
    if not given.tables:
        with ExitStack() as stack:
            places: tuple[HostSpec, ...] = (HostSpec(),)
            if not given.plain:
                lab = stack.enter_context(Hosts(count=HOSTS, rate=parse_rate(given.rate), name="thinwiregrid"))
                places = host_specs(lab)
            for cell, seed in _missing(found, chosen, given.seeds):
                found["cells"].setdefault(cell.name, {})[str(seed)] = run(cell, seed, given, places)
                _keep(given.out / "grid.json", found)
    summed = {cell: summary(found["cells"][cell.name]) for cell in chosen if cell.name in found["cells"]}
    print(table(summed, about))
    draw(summed, about, given.out / "grid.png")


def _missing(found: dict[str, Any], chosen: list[Cell], seeds: int) -> Iterator[tuple[Cell, int]]:
    """Seed by seed, so that a run that is broken off has something of every cell."""
    for seed in range(seeds):
        yield from ((cell, seed) for cell in chosen if str(seed) not in found["cells"].get(cell.name, {}))


def run(cell: Cell, seed: int, given: argparse.Namespace, places: tuple[HostSpec, ...]) -> dict[str, Any]:
    """One run, as `thinwire run` would do it; nothing is evaluated before its end."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            recipe=given.recipe,
            method="daso" if cell.skips else "allreduce",
            settings=cell.settings,
            workers=WORKERS,
            group_size=str(WORKERS // HOSTS) if given.plain else None,
            steps=given.steps,
            eval_every=named(given.recipe, steps=given.steps).steps,
            seed=seed,
            out=Path(folder),
            model=False,
            hosts=places,
        )
        job.check()
        told = job.run(lambda line: None)
        steps = [record for record in read_records(job.out / "records.jsonl") if record["kind"] == "step"]
    metric, share, seconds = told["metric"], told["traffic_vs_allreduce_fp32"], steps[-1]["wall_s"]
    shown = figure(metric, told[metric])
    print(f"{cell.name}, seed {seed}: {metric} {shown}, bytes {ratio(share)}, {seconds:.1f} s", flush=True)
    return {"metric": metric, metric: told[metric], "bytes": share, "seconds": seconds, "time": told["time"]}


def summary(seeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of one cell, over its seeds."""
    runs = list(seeds.values())
    metric = runs[0]["metric"]
    figures = [each[metric] for each in runs]
    return {
        "metric": metric,
        "mean": statistics.fmean(figures),
        "std": statistics.stdev(figures) if len(figures) > 1 else None,
        "bytes": statistics.fmean(each["bytes"] for each in runs),
        "seconds": statistics.median(each["seconds"] for each in runs),
        "seeds": len(runs),
    }


def table(summed: dict[Cell, dict[str, Any]], about: dict[str, Any]) -> str:
    """Markdown, one line a cell."""
    if not summed:
        return "nothing has run yet"
    metric = next(iter(summed.values()))["metric"]
    timed = ["seconds"] if about["rate"] else []
    headings = ["B", "S", metric, "bytes vs fp32 all-reduce", *timed, "seeds"]
    lines = [f"### {_title(about)}", "", f"| {' | '.join(headings)} |", f"|{' --: |' * len(headings)}"]
    for cell, row in summed.items():
        place = (
            [str(cell.skips), f"{cell.wait}{', compensated' * cell.compensated}"] if cell.skips else ["all-reduce", ""]
        )
        spent = [f"{row['seconds']:.1f}"] if timed else []
        words = [*place, figure(metric, row["mean"], row["std"]), ratio(row["bytes"]), *spent, str(row["seeds"])]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, ""])


def draw(summed: dict[Cell, dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """The metric over B, and beside it the time, where links were as slow as they say; all-reduce lies across."""
    if not summed:
        return
    metric = next(iter(summed.values()))["metric"]
    panels = [("mean", metric)] + ([("seconds", "seconds of training")] if about["rate"] else [])
    picture = blank(5.5 * len(panels), 4.4)
    for axes, (key, beside) in zip(picture.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        lines = {
            f"{kind}{', compensated' * way}": {
                c.skips: row
                for c, row in summed.items()
                if c.skips and c.wait == wait(c.skips) and c.compensated == way
            }
            for kind, wait in KINDS.items()
            for way in (False, True)
        }
        drawn = {label: by_skips for label, by_skips in lines.items() if by_skips}
        for stroke, (label, by_skips) in zip(strokes(len(drawn)), drawn.items(), strict=True):
            _line(axes, by_skips, key, stroke, label)
        if (usual := summed.get(Cell())) is not None:
            axes.axhline(usual[key], color="#8c8c8c", linestyle="--", label="all-reduce")
        _mark_skips(axes, sorted({cell.skips for cell in summed if cell.skips}))
        dress(axes, "B, steps between averages", beside)
        if key == "mean" and metric == "accuracy":
            from matplotlib.ticker import PercentFormatter

            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if key == "seconds":
            axes.set_ylim(bottom=0)
    picture.suptitle(f"DASO, {_title(about)}")
    picture.savefig(path)


def _line(axes: Any, by_skips: dict[int, dict[str, Any]], key: str, stroke: dict[str, Any], label: str) -> None:
    values = [row[key] for row in by_skips.values()]
    spread = [row["std"] or 0.0 for row in by_skips.values()] if key == "mean" else None
    style = {"linewidth": 2, "marker": "o", "markersize": 4, "capsize": 2, "elinewidth": 0.8}
    axes.errorbar(list(by_skips), values, yerr=spread, label=label, **style, **stroke)


def _mark_skips(axes: Any, skips: list[int]) -> None:
    """Powers of two, as far apart as each other."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(skips, [str(b) for b in skips])


def _title(about: dict[str, Any]) -> str:
    rate = parse_rate(about["rate"]) if about["rate"] else None
    where = f"2 hosts × 2 workers over {units.rate(rate)}" if rate else "2 × 2 workers"
    return f"{about['recipe']}, {about['steps']} steps, {where}"


def _kept(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What was found so far, if it is of the same runs."""
    if not path.is_file():
        return {"about": about, "cells": {}}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["about"] != about:
        raise SystemExit(f"{path} is of {found['about']}, not of {about}; give another --out")
    return found


def _keep(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="digits", help="digits, shakespeare, or FILE.py:FUNCTION")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--skips", default="1,2,4,8,16,32", help="B, by commas")
    parser.add_argument("--compensate", action="store_true", help="every S above 0 with compensation as well")
    parser.add_argument("--rate", default="100Mbit", help="of each host's link, or unshaped")
    parser.add_argument("--plain", action="store_true", help="workers of this machine without hosts; no root needed")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
