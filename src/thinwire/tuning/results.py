"""What a search found: the best trial, the Pareto front, and which parameters matter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.base.files import refuse_link, write_json
from thinwire.report.plots import blank
from thinwire.tuning.search import BEST, PARETO, PICTURE, Search
from thinwire.tuning.space import Code
from thinwire.tuning.trial import FINISHED, Trial

_BINS = 4
ENOUGH = 3 * _BINS
"""Finished trials from which on it shows which parameters matter."""


def finished(trials: Sequence[Trial]) -> list[Trial]:
    """Those with figures, the best first; of equal ones that with the fewest bytes."""
    done = (trial for trial in trials if trial.status == FINISHED)
    return sorted(done, key=lambda trial: (trial.loss, trial.figures.get("bytes", 0.0)))


def front(trials: Sequence[Trial], metric: str, *, lower: bool) -> list[Trial]:
    """Trials than which no other is as good in metric, bytes and size, and better in one; the fewest bytes first."""

    def figures(trial: Trial) -> tuple[float, float, float]:
        own = trial.figures
        return own["bytes"], own["size"], own[metric] if lower else -own[metric]

    found: list[tuple[float, float, float]] = []
    kept: list[Trial] = []
    for trial in sorted(trials, key=figures):  # what beats a trial in all three comes before it
        own = figures(trial)
        if not any(all(better <= mine for better, mine in zip(other, own, strict=True)) for other in found):
            found.append(own)
            kept.append(trial)
    return kept


def row_of(trial: Trial) -> dict[str, Any]:
    """A finished trial, for files and for programs."""
    return {"trial": trial.name, "values": trial.values, "figures": trial.figures, "loss": trial.loss}


def importance(search: Search, trials: Sequence[Trial]) -> dict[str, float]:
    """The share of the loss's variance, by ranks, that each parameter explains alone; corrected for chance.

    Trials are put into up to four bins of equal size by the parameter's code (its choices, if it has any), and the
    bins' means are compared: ε² of an analysis of variance. Trials that failed or were stopped are left out. With too
    few to fill the bins it is nothing but chance, and there is no share.
    """
    ended = finished(trials)
    if len(ended) < ENOUGH:
        return {}
    ranked = {id(trial): rank for rank, trial in enumerate(ended)}
    shares = {}
    for name in search.space:
        used = [trial for trial in ended if name in trial.values]
        pairs = [(trial.codes[name], float(ranked[id(trial)])) for trial in used]
        shares[name] = _explained(pairs, by_value=bool(search.space[name].choices))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _explained(pairs: Sequence[tuple[Code, float]], *, by_value: bool) -> float:
    bins = _bins(pairs, by_value)
    count, groups = len(pairs), len(bins)
    if groups < 2 or count <= groups:
        return 0.0
    middle = fmean(rank for _, rank in pairs)
    whole = sum((rank - middle) ** 2 for _, rank in pairs)
    inside = sum((rank - fmean(own)) ** 2 for own in bins for rank in own)
    if not whole:
        return 0.0
    noise = inside / (count - groups)
    return max(0.0, (whole - inside - (groups - 1) * noise) / whole)


def _bins(pairs: Sequence[tuple[Code, float]], by_value: bool) -> list[list[float]]:
    ordered = sorted(pairs)
    if by_value:
        return [[rank for _, rank in own] for _, own in groupby(ordered, key=lambda pair: pair[0])]
    size = -(-len(ordered) // _BINS) if ordered else 1
    return [[rank for _, rank in ordered[at : at + size]] for at in range(0, len(ordered), size)]


def best_config(search: Search, trial: Trial) -> dict[str, Any]:
    """What `thinwire run --config` takes to train the trial's settings again, on test data."""
    job = search.job_of(trial.values, trial.folder)
    names = ("recipe", "method", "workers", "group_size", "steps", "epochs", "batch_size", "optimizer", "lr")
    found = {name: value for name in (*names, "weight_decay") if (value := getattr(job, name)) is not None}
    for name, texts in (("set", job.settings), ("rate", job.rate), ("with", job.arguments)):
        found |= {name: list(texts)} if texts else {}
    return found


def write_results(search: Search, trials: Sequence[Trial]) -> list[Path]:
    """The best trial's config and the front; returns the files."""
    ended = finished(trials)
    if not ended:
        return []
    best, pareto = search.folder / BEST, search.folder / PARETO
    write_json(best, best_config(search, ended[0]))
    write_json(pareto, [row_of(t) for t in front(ended, search.metric, lower=search.lower_is_better)])
    return [best, pareto]


def draw_importance(search: Search, shares: dict[str, float]) -> Path:
    """A bar per parameter."""
    figure, path = blank(8, 1.2 + 0.35 * len(shares)), search.folder / PICTURE
    axes, names = figure.subplots(), list(reversed(shares))
    axes.barh(names, [100 * shares[name] for name in names])
    axes.set_xlabel(f"share of the variance of {search.objective.text} that it explains alone (%)")
    axes.set_xlim(0, 100)
    refuse_link(path)
    figure.savefig(path)
    return path
