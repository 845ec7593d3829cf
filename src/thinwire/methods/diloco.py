"""DiLoCo (arXiv 2311.08105), and its streaming variant (arXiv 2501.18512): local SGD with an outer Nesterov step.

With one group nothing is sent, and the outer steps remain.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from thinwire.config.common import Nesterov
from thinwire.methods.local_sgd import LocalSGD
from thinwire.methods.registry import register

_PAPERS = Nesterov(lr=0.7, momentum=0.9)


@register(
    "diloco",
    example={"warmup": 2, "every": 4},
    summary="Groups train alone; outer Nesterov steps by how far they came",
)
@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Groups train alone; their mean change is a gradient for an outer Nesterov step (arXiv 2311.08105).

    `fragments` above 1 is the streaming variant (arXiv 2501.18512): one part of the model at a time, sent
    during training and merged `overlap` steps later.
    """

    usual: ClassVar = {"every": 48}

    every: int | Literal["auto"] = "auto"
    """Steps between two outer steps of the same fragment of the model. "auto" is 48, or half of what follows the
    warm-up where that is less than 48 steps."""

    outer: Nesterov | None = _PAPERS
    """The outer step, with the paper's values; 1.0 and 0.5 are better with small `every`."""
