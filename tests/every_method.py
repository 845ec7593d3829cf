"""Every method, set so that each of its phases happens in a few steps, and when its workers must agree."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import thinwire
from thinwire.methods.registry import METHODS

STEPS = 20
BUILT_IN = [name for name, entry in METHODS.items() if entry.config.__module__.startswith("thinwire.")]
"""The package's own methods: other tests may have registered more."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A config, and after which steps all workers must hold the same, beyond those of a phase that spans the world."""

    config: Callable[..., Any]
    parameters: Callable[[int], bool] = lambda step: False
    buffers: Callable[[int], bool] = lambda step: False
    optimizer: Callable[[int], bool] = lambda step: False
    phases: frozenset[str] = frozenset({"train"})


def _ab(**fields: Any) -> Callable[..., Any]:
    """Warm-up 3, then cycles of 4 and 2; the cutoff is high, since random weights are flat."""
    cycle = {"total_steps": STEPS, "warmup": 3, "every": 4, "rebound": 2, "lr_rebound": 3, "cutoff": 0.6}
    return lambda **more: thinwire.AB.paper(**{**cycle, **fields, **more})


def _of(kind: Any, **fields: Any) -> Callable[..., Any]:
    return lambda **more: kind(**{**fields, **more})


def _averaged(step: int) -> bool:
    """When local SGD and DiLoCo average here: every fourth step after the warm-up."""
    return step > 2 and (step - 2) % 4 == 0


def _merged(step: int) -> bool:
    """When AB averages here: every third step after the warm-up."""
    return step > 2 and (step - 2) % 3 == 0


_PAPER_PHASES = frozenset({"warmup", "groups", "rebound", "final"})
_AB_PHASES = frozenset({"warmup", "local", "factored"})
_AB = {
    "total_steps": STEPS, "warmup": 2, "warmup_wire": "lowrank:2", "every": 3, "factor_at": 5, "redecompose": 2,
    "cutoff": 0.6,
}  # fmt: skip
_LOCAL = {"parameters": _averaged, "buffers": _averaged, "phases": frozenset({"warmup", "local"})}
_WARMED = frozenset({"warmup", "train"})

WAYS: dict[str, Way] = {
    "allreduce": Way(config=thinwire.AllReduce),
    "allreduce bf16": Way(config=_of(thinwire.AllReduce, wire="bf16")),
    "allreduce int8": Way(config=_of(thinwire.AllReduce, wire="int8")),
    "ab": Way(config=_of(thinwire.AB, **_AB), parameters=_merged, buffers=_merged, phases=_AB_PHASES),
    "ab split": Way(
        config=_of(thinwire.AB, **{**_AB, "train": "split", "wire": "fp32", "outer": None, "moments": "average"}),
        parameters=_merged,
        buffers=_merged,
        phases=_AB_PHASES,
    ),
    "ab both": Way(
        config=_of(thinwire.AB, **{**_AB, "train": "both", "wire": "int4", "overlap": 1, "match_rate": True}),
        phases=_AB_PHASES,
    ),
    "ab-paper": Way(config=_ab(), phases=_PAPER_PHASES),
    "ab-paper carry": Way(
        config=_ab(moments="carry", merge="trained", wire="bf16", warmup_wire="bf16"), phases=_PAPER_PHASES
    ),
    "ab-paper average": Way(config=_ab(moments="average", keep_first=False, keep_last=False), phases=_PAPER_PHASES),
    "oialr": Way(
        config=_of(thinwire.OIALR, total_steps=STEPS, factor_at=4, redecompose=3, cutoff=0.3, layer_fraction=0.5),
        phases=frozenset({"warmup", "lowrank"}),
    ),
    "daso": Way(
        config=_of(
            thinwire.DASO, total_steps=STEPS, warmup=4, cooldown=4, every=4, overlap=2, plateau_patience=None,
        ),
        parameters=lambda step: step <= 4 or step > 16,
        buffers=lambda step: step in (4, 20),
        phases=frozenset({"warmup", "cycling", "cooldown"}),
    ),
    "localsgd": Way(config=_of(thinwire.LocalSGD, warmup=2, every=4), **_LOCAL),
    "localsgd average": Way(
        config=_of(thinwire.LocalSGD, warmup=2, every=4, moments="average", wire="bf16", rows="seen"),
        optimizer=_averaged,
        **_LOCAL,
    ),
    "diloco": Way(config=_of(thinwire.DiLoCo, warmup=2, every=4), **_LOCAL),
    "diloco streaming": Way(
        config=_of(thinwire.DiLoCo, warmup=2, every=4, fragments=2, overlap=1, wire="int8", rows="seen"),
        phases=frozenset({"warmup", "local"}),
    ),
    "powersgd": Way(config=_of(thinwire.PowerSGD, rank=2, warmup=2), phases=_WARMED),
    "topk": Way(config=_of(thinwire.TopK, density=0.05, ramp=4), phases=frozenset({"ramp", "train"})),
    "onebit": Way(config=_of(thinwire.OneBit, warmup=2), phases=_WARMED),
}  # fmt: skip


WAYS_OF_ADAM: dict[str, Way] = {
    "localsgd estimate": Way(
        config=_of(thinwire.LocalSGD, warmup=2, every=4, second_moment="estimate", rows="seen"), **_LOCAL
    ),
    "localsgd shared": Way(
        config=_of(thinwire.LocalSGD, warmup=2, every=4, wire="int2", second_moment="shared"), **_LOCAL
    ),
    "ab shared": Way(
        config=_of(thinwire.AB, **_AB, second_moment="shared", moments_wire="int4"),
        parameters=_merged,
        buffers=_merged,
        phases=_AB_PHASES,
    ),
    "ab-paper estimate": Way(config=_ab(second_moment="estimate", moments="carry"), phases=_PAPER_PHASES),
    "daso estimate": replace(
        WAYS["daso"], config=lambda **more: replace(WAYS["daso"].config(**more), second_moment="estimate")
    ),
}
"""Those that correct what Adam divides by, and refuse other optimizers."""

ALL_WAYS = WAYS | WAYS_OF_ADAM


def engine(way: str) -> str:
    """What a method is built on, as far as models, loops and optimizers can tell."""
    name = way.split()[0]
    if name in ("localsgd", "diloco", "daso"):
        return "averages"
    return {"ab": "ab", "ab-paper": "cuts weights", "oialr": "cuts weights"}.get(name, "gradients")
