"""Methods × rates × layouts on links that are really slow: bytes by the kernel, seconds by the clock, and the plan's.

sudo python benchmarks/network/run.py --out runs/network            about 30 minutes on 2 cores
python benchmarks/network/run.py --out runs/network --tables        only the tables of what is there
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
METHODS = "allreduce,allreduce:wire=bf16,ab-paper"
RATES = "100Mbit,1Gbit,unshaped"
LAYOUTS = ((2, 2), (2, 4), (4, 4))  # hosts, workers
SHOWN = ("link", "method", "a step", "planned", "off", "speed-up", "planned", "wire")
HEADINGS = (*SHOWN, "ledger", "kernel", "headers", "left", "stolen")
# A cycle of AB fits into VGG16's few steps only by whole numbers; the share of its phases is the guideline's.
RECIPES = {
    "digits": ("digits", 90, ()),
    "shakespeare": ("shakespeare", 30, ()),
    "vgg16": (
        f"{HERE / 'vgg16.py'}:vgg16",
        8,
        ("ab-paper.warmup=2", "ab-paper.every=4", "ab-paper.rebound=1", "ab-paper.lr_rebound=1"),
    ),
}


def main() -> None:
    """Run what is asked for, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--tables", action="store_true", help="run nothing")
    options = parser.parse_args()
    for hosts, workers in LAYOUTS:
        for name in options.recipes.split(","):
            folder = options.out / f"{name}-{hosts}x{workers // hosts}"
            if not options.tables:
                run(name, hosts, workers, options.rates, folder)
            if (folder / "netbench.json").is_file():
                print(table(json.loads((folder / "netbench.json").read_text())), flush=True)


def run(name: str, hosts: int, workers: int, rates: str, folder: Path) -> None:
    """One `thinwire netbench`, as a user would start it."""
    recipe, steps, settings = RECIPES[name]
    words = [sys.executable, "-m", "thinwire", "netbench", recipe, "--methods", METHODS, "--steps", str(steps)]
    words += ["--hosts", str(hosts), "--workers", str(workers), "--rates", rates, "--out", str(folder), "--overwrite"]
    for text in settings:
        words += ["--set", text]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def table(found: dict[str, Any]) -> str:
    """Markdown, one line a rate and method."""
    each = found["workers"] // found["hosts"]
    lines = [
        f"### {found['recipe']}, {found['hosts']} × {each}, {found['steps']} steps",
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"| --- | --- |{' --: |' * (len(HEADINGS) - 2)}",
    ]
    for at in found["rates"]:
        for row in at["methods"]:
            lines.append(f"| {at['rate']} | {' | '.join(cells(row))} |")
            if "planned_with_ranks" in row:
                again = cells(row | {"planned": row["planned_with_ranks"]})
                lines.append(f"| | with its own ranks | | {again[2]} | {again[3]} | | {again[5]} |" + " |" * 6)
    return "\n".join([*lines, ""])


def cells(row: dict[str, Any]) -> list[str]:
    """The figures of one run."""
    planned, whole = row["planned"], row["whole"]
    seconds = sum(phase["seconds"] for phase in row["time"].values())
    waited = sum(phase["wire"] for phase in row["time"].values())
    return [
        row["method"],
        f"{1e3 * row['step_s']:.0f} ms",
        f"{1e3 * planned['seconds_per_step']:.0f} ms",
        f"{100 * (planned['seconds_per_step'] / row['step_s'] - 1):+.0f} %",
        f"{row['speedup']:.2f}",
        f"{planned['speedup']:.2f}",
        f"{100 * waited / seconds:.0f} %",
        f"{whole['ledger_bytes'] / 1e6:.1f} MB",
        f"{whole['kernel_bytes'] / 1e6:.1f} MB",
        f"{whole['headers_bytes'] / 1e6:.1f} MB",
        f"{100 * whole['left_share']:.2f} %",
        f"{100 * row['stolen']:.0f} %",
    ]


if __name__ == "__main__":
    main()
