"""The command that trains a run again, rebuilt from its summary."""

from __future__ import annotations

import shlex
from typing import Any


def command(summary: dict[str, Any]) -> str:
    """The command as it was given, on as many workers; if the run was not started by one, what comes nearest."""
    given = summary.get("command")
    if not (isinstance(given, list) and given and all(isinstance(word, str) for word in given)):
        return _rebuilt(summary)
    workers = ["--workers", str(summary["world_size"])] if "world_size" in summary else []
    return shlex.join(["thinwire", *given, *workers])


def _rebuilt(summary: dict[str, Any]) -> str:
    """Every setting of the method, but no data, optimizer, `--rate`, `--with` or own file."""
    words = ["thinwire", "run", summary["recipe"], "--method", summary["method"], "--seed", summary["seed"]]
    optional = {
        "--workers": summary.get("world_size"),
        "--steps": summary.get("length", summary.get("steps")),
        "--batch-size": summary.get("batch"),
        # Also where they are the recipe's own: a summary does not say whether the user gave them.
        **{f"--{name.replace('_', '-')}": _number(summary.get(name)) for name in ("lr", "weight_decay")},
        "--group-size": summary["config"].get("group_size"),
    }
    for flag, value in optional.items():
        words += [] if value is None else [flag, value]
    words += ["--validate"] if summary.get("split") == "validation" else []
    for name, value in summary["config"].items():
        if name != "group_size" and (text := typed(value)) is not None:
            words += ["--set", f"{name}={text}"]
    return shlex.join(str(word) for word in words)


def _number(value: Any) -> Any:
    """None for what no option takes: a list, where parameter groups differ."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def typed(value: Any) -> str | None:
    """A setting as `--set` takes it; None for what cannot be typed."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    if isinstance(value, dict):  # an outer step, which is written as LR or LR/MOMENTUM, or `radial`
        if "lr" not in value:
            return "radial" if value == {"most": None} else None
        momentum = value.get("momentum")
        return f"{value['lr']}" + ("" if momentum is None else f"/{momentum}")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
