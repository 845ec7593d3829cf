"""Which methods are advised: those of the README, and where a method was measured to lose accuracy.

This is the only place for it. A plan knows bytes and seconds; what is known about accuracy was measured in the studies
that are named here.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import nn

from thinwire.config import AB, AllReduce, LocalSGD, OneBit, PowerSGD, TopK
from thinwire.config.common import Averaged
from thinwire.methods.registry import METHODS
from thinwire.plan.workload import Workload

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
