"""Which method of a plan to use: the fastest one on its links whose limits allow it, and why.

Limits are where a method was measured to lose accuracy, and this is the only place for them. A plan knows bytes and
seconds; what is known about accuracy was measured in the studies that are named here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from torch import nn

from thinwire.base import units
from thinwire.config.common import Averaged
from thinwire.methods import AB, AllReduce, LocalSGD, OneBit, PowerSGD, TopK
from thinwire.methods.registry import METHODS
from thinwire.plan.forecast import Forecast, Links
from thinwire.plan.workload import Workload

GAINS, ALIKE = 1.1, 1.05
"""A smaller speed-up does not pay for a change; times closer than this are the same, as far as a plan can tell."""
# The rows of the README, those first that are planned quickly.
_ROWS = (
    "allreduce",
    "allreduce:wire=int8",
    "diloco:every=24:wire=int2:outer=1.0/0.5:warmup=0.05:warmup_wire=lowrank:16",
    "ab",
)
# What docs/training-apart.md has for words.
_WITH_WORDS = "localsgd:every=3:wire=int2:second_moment=shared:warmup=0.05:warmup_wire=lowrank:16"
# Rows of an embedding: of characters, bytes and positions there are fewer, of words and their pieces more.
_VOCABULARY = 5_000


@dataclass(frozen=True)
class Choice:
    """One method, beside fp32 all-reduce."""

    method: str
    speedup: float
    seconds_per_step: float
    slow_bytes_per_step: float
    limits: tuple[str, ...] = ()
    """Why it is not advised here."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to use on these links."""

    best: Choice
    """The fastest method without limits, or fp32 all-reduce if no other is clearly faster."""
    baseline: Choice
    """fp32 all-reduce, as DistributedDataParallel does it."""
    waiting: float
    """Share of the baseline's time in which workers wait for the links."""
    alike: tuple[str, ...] = ()
    """Other methods as fast as the best one, within the accuracy of a plan."""
    closest: Choice | None = None
    """The fastest all-reduce in fewer bits, where another method is best: it trains as DistributedDataParallel does."""
    faster: tuple[Choice, ...] = ()
    """Methods that would be clearly faster, but have limits."""

    @property
    def changes(self) -> bool:
        """Whether another method than the baseline is best."""
        return self.best is not self.baseline

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "why": self.why}

    @property
    def why(self) -> str:
        """One or two sentences."""
        usual, best = self.baseline, self.best
        waits = f"fp32 all-reduce sends {units.size(usual.slow_bytes_per_step)} per node and step and waits for the "
        waits += f"link {100 * self.waiting:.0f} % of the time"
        if not self.changes:
            other = "method that is advised here" if self.faster else "method"
            return f"{waits}; no other {other} would be faster by {100 * (GAINS - 1):.0f} %"
        fewer = usual.slow_bytes_per_step / best.slow_bytes_per_step if best.slow_bytes_per_step else None
        less = f", {fewer:.3g} times less" if fewer and fewer > GAINS else ""
        return f"{waits}; {best.method.partition(':')[0]} sends {units.size(best.slow_bytes_per_step)}{less}"

    def lines(self) -> list[str]:
        """In words."""
        usual, best = self.baseline, self.best
        if not self.changes:
            out = [f"Stay with all-reduce in fp32, {units.time(usual.seconds_per_step)} per step: {self.why}."]
        else:
            out = [
                f"Use {best.method}: {units.time(best.seconds_per_step)} per step instead of "
                f"{units.time(usual.seconds_per_step)}, {_times(best.speedup)} as fast as fp32 DDP.",
                f"Why: {self.why}.",
            ]
        if self.alike:
            out.append(f"As fast within {100 * (ALIKE - 1):.0f} %: {', '.join(self.alike)}.")
        if (near := self.closest) is not None:
            out.append(
                f"Closest to DDP: {near.method}, {units.time(near.seconds_per_step)} per step, {_times(near.speedup)} "
                f"as fast, {units.size(near.slow_bytes_per_step)} per step."
            )
        for own in self.faster:
            out.append(f"Not advised here: {own.method}, {_times(own.speedup)} as fast: {'; '.join(own.limits)}.")
        if self.changes:
            out.append("A plan knows bytes and seconds, not accuracy: `thinwire compare` measures that.")
        return out


def recommend(baseline: Forecast, forecasts: Mapping[str, Forecast], links: Links) -> Recommendation:
    """The fastest of these methods and of the baseline, fp32 all-reduce, on these links, limits permitting."""
    split = baseline.seconds(links)
    whole = sum(split.values())

    def choice(name: str, forecast: Forecast) -> Choice:
        seconds, steps = sum(forecast.seconds(links).values()), forecast.workload.steps
        limits = tuple(limit.text for limit in limits_of(forecast.workload, forecast.config, forecast.groups))
        return Choice(name, whole / seconds, seconds / steps, forecast.slow_bytes / steps, limits)

    usual = choice("allreduce", baseline)
    choices = {name: choice(name, own) for name, own in forecasts.items() if not _is_baseline(own.config)}
    limited = [own for own in choices.values() if own.limits]
    choices = {name: own for name, own in choices.items() if not own.limits}
    fastest = _fastest(choices.values())
    best = fastest if fastest is not None and fastest.speedup >= GAINS else usual
    others = [own for own in choices.values() if best is not usual and own is not best]
    coded = [own for own in others if isinstance(forecasts[own.method].config, AllReduce) and own.speedup >= GAINS]
    return Recommendation(
        best=best,
        baseline=usual,
        waiting=split["wire"] / whole,
        alike=tuple(own.method for own in others if own.speedup * ALIKE >= best.speedup),
        faster=tuple(own for own in limited if own.speedup >= GAINS * best.speedup),
        closest=None if isinstance(getattr(forecasts.get(best.method), "config", None), AllReduce) else _fastest(coded),
    )


def _fastest(choices: Iterable[Choice]) -> Choice | None:
    return max(choices, key=lambda own: own.speedup, default=None)


def _is_baseline(config: Any) -> bool:
    return isinstance(config, AllReduce) and config.wire == "fp32"


def _times(factor: float) -> str:
    return f"{factor:.2g} times"


@dataclass(frozen=True)
class Situation:
    """What limits depend on."""

    config: Any
    groups: int
    steps: int
    recipe: str | None
    has_words: bool
    is_adaptive: bool
    """Whether the optimizer divides by second moments, as Adam does."""

    @property
    def keeps_own_moments(self) -> bool:
        """Whether groups train apart, and each divides by the noise of its own batch."""
        return isinstance(self.config, Averaged) and self.config.second_moment == "group"


class Limit(NamedTuple):
    """A loss that was measured."""

    applies: Callable[[Situation], bool]
    says: str
    source: str

    @property
    def text(self) -> str:
        return f"{self.says} ({self.source})"


_HUNDREDFOLD, _WORDS, _CHOICE = "benchmarks/hundredfold", "benchmarks/words", "docs/which-method.md"

# Digits is exempt from what was measured on VGG16-BN: there the same was measured without a loss.
LIMITS = (
    Limit(
        lambda s: s.has_words and isinstance(s.config, AB) and s.keeps_own_moments,
        "with words AB lost 42 % of perplexity, on WikiText-2 in 2,550 steps",
        _WORDS,
    ),
    Limit(
        lambda s: s.has_words and isinstance(s.config, LocalSGD) and s.keeps_own_moments,
        "with words groups that keep their own moments lost 32 % of perplexity, on WikiText-2 in 2,550 steps; in "
        "10,000 steps of a larger model they lost nothing, one seed",
        _WORDS,
    ),
    Limit(
        lambda s: s.has_words and not isinstance(s.config, AllReduce | Averaged),
        "not measured on word-level language models",
        _WORDS,
    ),
    Limit(
        lambda s: s.groups > 4 and s.keeps_own_moments and s.recipe != "digits",
        "with many groups AB loses more: 1.5 points on VGG16-BN with 16 groups, 0.6 with 4",
        _HUNDREDFOLD,
    ),
    Limit(
        lambda s: s.steps < 1_960 and isinstance(s.config, Averaged) and s.recipe != "digits",
        "in short runs AB loses more: 1.8 points on VGG16-BN in 980 steps, 0.6 in 1,960, 0.06 in 7,350",
        _HUNDREDFOLD,
    ),
    Limit(
        lambda s: isinstance(s.config, PowerSGD) and s.recipe != "digits",
        "it lost 1.2 points on VGG16-BN, one seed",
        _CHOICE,
    ),
    Limit(
        lambda s: isinstance(s.config, TopK | OneBit) and s.is_adaptive,
        "codes that keep little of a gradient are for SGD, not for Adam",
        _CHOICE,
    ),
)


def limits_of(workload: Workload, config: Any, groups: int) -> list[Limit]:
    """The limits that apply to a method in this run."""
    own = workload.suited_to(config)
    adaptive = any(name.startswith("exp_avg_sq") for name in own.state)
    known = Situation(config, groups, own.steps, own.recipe, has_words(own), adaptive)
    return [limit for limit in LIMITS if limit.applies(known)]


def has_words(workload: Workload) -> bool:
    """Whether the model looks up words, or pieces of them."""
    modules = workload.without_values.modules()
    return any(isinstance(m, nn.Embedding) and m.num_embeddings >= _VOCABULARY for m in modules)


def methods_for(workload: Workload) -> str:
    """What to plan unless the user names methods."""
    first, *more = _ROWS
    return ",".join([first, *([_WITH_WORDS] if has_words(workload) else []), *more])


def every_method() -> str:
    """All of them, and int8; those first that are planned quickly, which do not decompose."""
    decompose = {name: "cutoff" in {f.name for f in fields(entry.config)} for name, entry in METHODS.items()}
    return ",".join([*sorted(METHODS, key=decompose.__getitem__), _ROWS[1]])
