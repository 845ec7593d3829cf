"""What a search looks for: `accuracy`, `accuracy,bytes<=0.01`, `bytes,accuracy>=0.98`, `max:accuracy-5*bytes`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.base.errors import ConfigError, unknown
from thinwire.report.comparison import BETTER_HIGH, BETTER_LOW

FAILED = 1e9
"""The loss of a trial that has no figures: finite, since Propulate calculates with it."""
_UNMET = 1e6
"""Added for a limit that is not met: all that meet the limits come first, then those that nearly do."""
FIGURES = {
    "bytes": "slow-link bytes, as a share of fp32 all-reduce's",
    "size": "parameters of the finished model, as a share of the full one's",
    "seconds": "the run's time on the link of --bandwidth and --latency, planned",
    "wall": "the run's time here, measured",
}
_NAME = r"[A-Za-z_]\w*"
_TERM = r"\s*([+-]?)\s*(?:([0-9.eE-]+)\s*\*\s*)?({names})"
_LIMIT = r"\s*({names})\s*(<=|>=)\s*([0-9.eE+-]+)\s*"


@dataclass(frozen=True)
class Limit:
    """A figure that a trial must keep."""

    name: str
    at_most: bool
    bound: float

    def missed_by(self, figures: Mapping[str, float]) -> float:
        """How far outside, as a share of the bound; 0 if it is kept."""
        outside = figures[self.name] - self.bound if self.at_most else self.bound - figures[self.name]
        return max(0.0, outside) / (abs(self.bound) or 1.0)


@dataclass(frozen=True)
class Objective:
    """A weighted sum of figures to make small, and limits."""

    text: str
    weights: Mapping[str, float]
    limits: tuple[Limit, ...] = ()

    @property
    def names(self) -> set[str]:
        """The figures that it needs."""
        return {*self.weights, *(limit.name for limit in self.limits)}

    def loss(self, figures: Mapping[str, float]) -> float:
        """What the search makes small; always finite."""
        if not all(math.isfinite(figures.get(name, math.nan)) for name in self.names):
            return FAILED
        missed = sum(limit.missed_by(figures) for limit in self.limits)
        if missed:
            return _UNMET * (1 + min(missed, 100.0))
        value = sum(weight * figures[name] for name, weight in self.weights.items())
        return max(-_UNMET / 2, min(_UNMET / 2, value))

    def loss_if_stopped(self, metric: str, value: float) -> float:
        """That of a trial stopped early: above all that keep the limits, since its other figures are not known."""
        return _UNMET / 2 + max(0.0, min(_UNMET / 2 - 1, _UNMET / 4 + self.weights[metric] * value))

    def is_met(self, loss: float) -> bool:
        """Whether a trial with this loss finished, and kept all limits."""
        return loss < _UNMET

    def is_lower_better(self, metric: str) -> bool:
        """Whether a lower metric is better: as the goal has it, or a limit, or by its name."""
        if weight := self.weights.get(metric):
            return weight > 0
        limit = next((limit for limit in self.limits if limit.name == metric), None)
        return limit.at_most if limit else _is_lower_better(metric)

    def follows(self, metric: str) -> bool:
        """Whether a trial with a poor metric is a poor trial, so that it may be stopped early."""
        return bool(self.weights.get(metric))


def parse_objective(text: str, metric: str) -> Objective:
    """A goal and limits, separated by commas; `metric` is the recipe's."""
    goal, *limits = [part.strip() for part in text.split(",")]
    if metric in FIGURES:
        raise ConfigError(f"the recipe's metric is called `{metric}`, as a figure of every run; give it another name")
    known = (metric, *FIGURES)
    return Objective(text, _weights(goal, metric, known), tuple(_limit(part, known) for part in limits))


def _weights(goal: str, metric: str, known: tuple[str, ...]) -> dict[str, float]:
    direction, colon, terms = goal.partition(":")
    if not colon:
        if goal not in known:
            raise unknown("objective", goal, [*known, "max:… or min:… with a sum such as accuracy-5*bytes"])
        return {goal: 1.0 if goal in FIGURES or _is_lower_better(metric) else -1.0}
    if direction not in ("max", "min"):
        raise unknown("direction of the objective", direction, ("max", "min"))
    sign, weights, at = (-1.0 if direction == "max" else 1.0), dict[str, float](), 0
    while at < len(terms):
        found = _pattern(_TERM, known).match(terms, at)
        if not found or (at and not found[1]):
            raise ConfigError(f"`{terms}` must be a sum of figures with weights, such as accuracy-5*bytes")
        if found[3] not in known:
            raise unknown("figure of the objective", found[3], known)
        weights[found[3]] = weights.get(found[3], 0.0) + sign * (-1 if found[1] == "-" else 1) * _number(
            found[2] or "1"
        )
        at = found.end()
    if not weights:
        raise ConfigError(f"`{goal}` names no figure, choose from: {', '.join(known)}")
    return weights


def _limit(part: str, known: tuple[str, ...]) -> Limit:
    found = _pattern(_LIMIT, known).fullmatch(part)
    if not found:
        raise ConfigError(f"`{part}` must be a limit such as bytes<=0.01 or accuracy>=0.98")
    if found[1] not in known:
        raise unknown("figure of a limit", found[1], known)
    return Limit(found[1], found[2] == "<=", _number(found[3]))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"`{text}` is not a number") from None


def _pattern(written: str, known: tuple[str, ...]) -> re.Pattern[str]:
    """With all names of figures, also a metric such as top-1."""
    longest_first = sorted(map(re.escape, known), key=len, reverse=True)
    return re.compile(written.format(names="|".join([*(rf"{name}(?!\w)" for name in longest_first), _NAME])))


def _is_lower_better(metric: str) -> bool:
    if metric in BETTER_HIGH or metric in BETTER_LOW:
        return metric in BETTER_LOW
    raise ConfigError(
        f"the recipe's metric is `{metric}`, and nothing says whether more of it is better; give `--objective "
        f"max:{metric}` or `--objective min:{metric}`"
    )
