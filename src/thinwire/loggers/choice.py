"""Loggers as a user names them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from thinwire.base.errors import ConfigError, unknown
from thinwire.loggers.fanout import Logger
from thinwire.loggers.to_mlflow import MLflow
from thinwire.loggers.to_tensorboard import TensorBoard
from thinwire.loggers.to_trackio import Trackio
from thinwire.loggers.to_wandb import WandB
from thinwire.loggers.tracker import EVERY, Tracker

_KINDS: tuple[type[Tracker], ...] = (TensorBoard, WandB, Trackio, MLflow)
NAMES = {"tensorboard": "DIR", "wandb": "PROJECT", "trackio": "PROJECT", "mlflow": "EXPERIMENT"}
"""Names of trackers, and what may follow after a colon."""


def chosen(loggers: Iterable[str | Logger], every: int | None = None) -> list[Logger]:
    """Loggers by name, such as "tensorboard" or "wandb:PROJECT", beside those given as such.

    Raises if one is not known or its package is not installed, so call it before any training starts.
    """
    if isinstance(loggers, str) or callable(loggers):
        raise ConfigError(f"`loggers`={loggers!r} must be a list, such as ['tensorboard']")
    found: list[Logger] = []
    for given in loggers:
        names = [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else [given]
        found += [_made(name, EVERY if every is None else every) if isinstance(name, str) else name for name in names]
    for logger in found:
        _check(logger)
    return found


def _made(text: str, every: int) -> Tracker:
    name, _, place = text.partition(":")
    kinds = {kind.name: kind for kind in _KINDS}
    if name not in kinds:
        raise unknown("logger", name, kinds)
    return kinds[name](place or None, every=every)


def _check(logger: Logger) -> None:
    if not callable(logger):
        raise ConfigError(f"logger {logger!r} must be a function of one record, or one of {', '.join(NAMES)}")
    if isinstance(logger, Tracker) and not _is_installed(logger.name):
        raise ConfigError(
            f"the logger {logger.name} needs the package {logger.name}: pip install 'thinwire[{logger.name}]'"
        )


def _is_installed(package: str) -> bool:
    """A folder that happens to have the name, as the one that wandb writes to, is found too, but has no origin."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
