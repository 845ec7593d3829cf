"""Tables and curves of what run.py has trained, as docs/results.md has them.

python benchmarks/papers/tables.py OUT --cifar DIR --pictures docs
"""

import argparse
import re
from pathlib import Path
from typing import Any, cast

from run import WORKERS

from thinwire.methods import PaperAB
from thinwire.plan import compute
from thinwire.plan.forecast import Layout, Links
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.workload import of_recipe
from thinwire.recipes import named
from thinwire.report.plots import blank, colours, dress
from thinwire.report.runs import Run, read_run
from thinwire.train.data import Source
from thinwire.train.initial import without_values

FAMILIES = ("vgg16", "vgg16bn", "gpt", "autoformer", "resized", "minivit")
_HEIGHTS = {"accuracy": {"bottom": 0.8}, "mse": {"bottom": 0.2, "top": 0.3}, "perplexity": {"bottom": 100, "top": 300}}


def main() -> None:
    """Every family that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cifar", type=Path, help="for the bytes of runs that one worker took over")
    parser.add_argument("--pictures", type=Path, default=Path())
    given = parser.parse_args()
    for family in FAMILIES:
        runs = {p.parent.name: read_run(p.parent) for p in sorted(given.out.glob(f"{family}-*/summary.json"))}
        if runs:
            _table(family, runs, given)
            _picture(family, runs, given.pictures / f"results-{family}.png")


def _table(family: str, runs: dict[str, Run], given: argparse.Namespace) -> None:
    metric = next(iter(runs.values())).metric
    headings = ["run", metric, "best", "before cutting", "model", "trained then", "bytes", "steps", "wall s"]
    print(f"\n{family}\n| {' | '.join(headings)} |")
    print("| --- " * len(headings) + "|")
    for name, run in runs.items():
        told = run.summary
        best = _best(run)
        figures = [told[metric], best[metric], told[f"{metric}_before_truncation"]]
        cells = [f"{100 * f:.2f}" if metric == "accuracy" else f"{f:.4f}" for f in figures]
        cells[1] += f" / {best['mae']:.4f} after {best['step']}" if "mae" in best else ""
        size = [f"{told['compression']:.2f} : 1", f"{100 * best['trainable'] / told['parameters_full']:.1f} %"]
        if "best_epoch" in told and not _is_narrow(run):
            size[1] += f" of {told['parameters_full'] / _held(run, best):.2f} : 1"
        print(
            "| " + " | ".join([name, *cells, *size, _bytes(run, given), str(told["steps"]), f"{told['wall_s']:.0f}"]),
            "|",
        )


def _best(run: Run) -> dict[str, Any]:
    """The evaluation of the epoch that validation chose, or the best one where nothing was chosen by."""
    looks = run.evaluations()
    if "best_epoch" in run.summary:
        return next(look for look in looks if look["step"] == run.summary["best_epoch"]["step"])
    return max(looks, key=lambda look: look[run.metric] if run.metric == "accuracy" else -look[run.metric])


def _is_narrow(run: Run) -> bool:
    """By run.py --quick, of which nothing is reckoned."""
    return run.summary["recipe"].startswith("narrow")


def _held(run: Run, look: dict[str, Any]) -> int:
    """Numbers that the model had at an evaluation, with all three factors of what had ranks."""
    recipe = named(run.summary["recipe"])
    model = without_values(lambda: recipe.model(cast(Source, None)))  # Autoformer's, which asks nothing of the data
    held = sum(p.numel() for p in model.parameters())
    for label, rank in look["ranks"].items():
        weight = model.get_submodule(label).weight.flatten(1)
        held += rank * (sum(weight.shape) + rank) - weight.numel()
    return held


def _bytes(run: Run, given: argparse.Namespace) -> str:
    """As a share of fp32 all-reduce: what was counted, or what is planned where one worker stood for all."""
    told = run.summary
    if told["world_size"] > 1:
        return f"{told['traffic_vs_allreduce_fp32']:.4f}"
    if told["method"] == "allreduce":
        return "1"
    if told["method"] != "ab-paper" or given.cifar is None or _is_narrow(run):
        return "–"
    return f"{_planned(run, given.cifar)['traffic_vs_allreduce_fp32']:.4f}, planned"


def _planned(run: Run, data: Path) -> dict[str, Any]:
    told = run.summary
    # Of a recipe with another augmentation the bytes are those of the usual one.
    recipe = named(told["recipe"].removesuffix("-resized"), steps=told["steps"], eval_every=told["steps"])
    workload = of_recipe(recipe, WORKERS, data)
    config = PaperAB(**{**told["config"], "keep": tuple(told["config"]["keep"])})
    watch = Stopwatch(workload, compute.given(0.1))
    plan = make_plan(
        workload, {"ab-paper": config}, Layout(workers=WORKERS), Links(), stopwatch=watch, ranks=run.folder
    )
    return plan.as_dict()["methods"][0]


def _picture(family: str, runs: dict[str, Run], path: Path) -> None:
    """A colour a method, a thin line a further seed; the height is for what happens late."""
    figure = blank(7.5, 4.2)
    axes = figure.subplots()
    metric = next(iter(runs.values())).metric
    labels = {name: re.sub(r"-seed\d+$", "", name).removeprefix(f"{family}-") for name in runs}
    palette = dict(zip(dict.fromkeys(labels.values()), colours(len(runs)), strict=False))
    seen: set[str] = set()
    for name, run in runs.items():
        points, label = run.evaluations(), labels[name]
        style = {"linewidth": 0.9, "alpha": 0.5} if label in seen else {"linewidth": 1.8, "label": label}
        axes.plot([p["step"] for p in points], [p[metric] for p in points], color=palette[label], **style)
        seen.add(label)
    dress(axes, "steps", metric)
    axes.set_ylim(**_HEIGHTS.get(metric, {}))
    axes.set_title(f"{next(iter(runs.values())).summary['recipe']}: {metric} on held-out data")
    figure.savefig(path)


if __name__ == "__main__":
    main()
