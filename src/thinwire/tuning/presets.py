"""Spaces by name, for `--space`. `lr_scale` multiplies the recipe's learning rate, so that they fit any recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.tuning.space import Space, read_space, space_of

_RATE = {"lr_scale": {"from": 0.3, "to": 3.0, "scale": "log"}}
_APART = {
    "every": {"from": 4, "to": 64, "scale": "log"},
    "wire": {"choices": ["int2", "int4", "int8"]},
    "warmup": {"from": 0.02, "to": 0.15, "scale": "log"},
    "warmup_wire": {"choices": ["lowrank:8", "lowrank:16", "lowrank:32", "int4"]},
}
_OUTER = {"outer": {"choices": ["none", "1.0/0.3", "1.0/0.5", "1.0/0.7", "0.7/0.9"]}}

PRESETS: dict[str, dict[str, Any]] = {
    "ab": {
        **_RATE,
        **_APART,
        **_OUTER,
        "factor_at": {"choices": ["none", "0.5", "0.65", "0.75", "0.85"]},
        "cutoff": {"from": 0.08, "to": 0.35, "when": "factor_at!=none"},
    },
    "allreduce": {**_RATE, "wire": {"choices": ["fp32", "bf16", "int8", "int4", "int2", "lowrank:16"]}},
    "localsgd": {**_RATE, **_APART},
    "diloco": {**_RATE, **_APART, **_OUTER},
    "daso": {
        **_RATE,
        "every": {"from": 4, "to": 64, "scale": "log"},
        "warmup": {"from": 0.02, "to": 0.2, "scale": "log"},
        "cooldown": {"from": 0.02, "to": 0.2, "scale": "log"},
    },
    "oialr": {
        **_RATE,
        "factor_at": {"from": 0.05, "to": 0.6},
        "redecompose": {"from": 0.02, "to": 0.2, "scale": "log"},
        "cutoff": {"from": 0.01, "to": 0.5, "scale": "log"},
    },
    "powersgd": {**_RATE, "rank": {"from": 1, "to": 32, "scale": "log"}, "warmup": _APART["warmup"]},
    "topk": {**_RATE, "density": {"from": 0.0005, "to": 0.05, "scale": "log"}, "warmup": _APART["warmup"]},
    # The dissertation's Tables A.3 and A.5. Rates there are absolute; `rate.floor` and `rate.start` are multiples of
    # `lr`. Steps and epochs there are shares of the run here: of 300 epochs of 49 steps, and of 20 of 1,073.
    "minivit": {
        "lr": {"from": 5e-5, "to": 1e-3, "scale": "log"},
        "rate.floor": {"from": 0.02, "to": 5.0, "scale": "log"},
        "rate.start": {"from": 0.02, "to": 1.0, "scale": "log"},
        "rate.k_decay": {"from": 0.1, "to": 2.0},
        "rate.warmup": {"from": 0.0033, "to": 0.067},
        "cutoff": {"from": 0.01, "to": 0.9},
        "redecompose": {"from": 0.0137, "to": 0.068},
        "factor_at": {"from": 0.068, "to": 0.68},
    },
    "autoformer": {
        "lr": {"from": 1e-5, "to": 5e-3, "scale": "log"},
        "rate.floor": {"from": 0.01, "to": 5.0, "scale": "log"},
        "rate.start": {"from": 0.01, "to": 1.0, "scale": "log"},
        "rate.k_decay": {"from": 0.001, "to": 2.0},
        "rate.warmup": {"from": 0.1, "to": 0.5},
        "cutoff": {"from": 0.01, "to": 0.9},
        "redecompose": {"from": 0.0025, "to": 0.095},
        "updates_from": {"from": 0.012, "to": 0.12},  # factors from the start: Table A.4's warm-up at full rank is off
        "keep_first": {"choices": [False, True]},
        "keep_last": {"choices": [False, True]},
    },
}


def chosen_space(text: str | None, method: str, steps: int) -> Space:
    """A preset by its name, or the space in a file; by default the preset of the method's name.

    A preset's rounds are at most a quarter of a run of so many steps.
    """
    name = text or method
    if name in PRESETS:
        own = dict(PRESETS[name])
        if "every" in own:
            own["every"] = own["every"] | {"to": min(own["every"]["to"], max(own["every"]["from"] + 1, steps // 4))}
        return space_of(own, f"the preset {name}")
    path = Path(name)
    if text is None or not (path.suffix == ".toml" or path.exists()):
        known = ", ".join(PRESETS)
        raise ConfigError(f"`--space`={name!r} is neither a TOML file nor a preset; give a file, or one of: {known}")
    return read_space(path)
