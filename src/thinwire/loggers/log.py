"""Loggers beside a run, chosen by name: each record goes to all of them, and none can end the training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ConfigError, ThinwireError, one_line, unknown
from thinwire.loggers.trackers import EVERY, FILE, MLflow, Record, TensorBoard, Tracker, Trackio, WandB
from thinwire.replica.replica import Replica

Logger = Callable[[Record], Any]
"""Called with each record, in the process of rank 0."""
NAMES = {"tensorboard": "DIR", "wandb": "PROJECT", "trackio": "PROJECT", "mlflow": "EXPERIMENT"}
"""Names of trackers, and what may follow after a colon."""
_KINDS: dict[str, type[Tracker]] = {kind.name: kind for kind in (TensorBoard, WandB, Trackio, MLflow)}

log = logging.getLogger("thinwire")


class Arriving:
    """Passes records on when their numbers are there, without waiting: a record goes before the next, or by `flush`."""

    def __init__(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        self._deliver = deliver
        self._waiting: dict[str, Any] | None = None

    def put(self, record: dict[str, Any]) -> None:
        """One record; values may be tensors of one number."""
        self.flush()
        self._waiting = {name: _pending(value) for name, value in record.items()}
        if not any(isinstance(value, _Pending) for value in self._waiting.values()):
            self.flush()

    def flush(self) -> None:
        """Wait for the numbers of the last record, and pass it on."""
        if self._waiting is not None:
            arrived = {n: v.number() if isinstance(v, _Pending) else v for n, v in self._waiting.items()}
            self._waiting = None
            self._deliver(arrived)


class _Pending:
    """A number being copied from a GPU to pinned memory."""

    def __init__(self, value: Tensor) -> None:
        self._here = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(
            value.detach(), non_blocking=True
        )
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def number(self) -> float:
        self._arrived.synchronize()
        return self._here.item()


def _pending(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Pending(value) if value.is_cuda else value.item()


class Loggers:
    """Hands each record to all loggers. One that raises is left out from then on, with one warning."""

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self._loggers = list(loggers)
        self._step = 0

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def begin(self, **values: Any) -> None:
        """The first record. Nothing is lost yet, so an error here ends the run."""
        record = {"kind": "begin", **values}
        self._step = values["step"]
        begun: list[Logger] = []
        for logger in self._loggers:
            try:
                logger(dict(record))
            except Exception as error:
                self._loggers = begun
                self.end("failed", {})
                if isinstance(error, ThinwireError) or not isinstance(logger, Tracker):
                    raise
                raise ConfigError(
                    f"the logger {logger.name} could not begin: {one_line(error)}; leave it out, or see docs/logging.md"
                ) from error
            begun.append(logger)

    def write(self, record: Record) -> None:
        """One record, to each a copy of its own."""
        self._step = record.get("step", self._step)
        for logger in list(self._loggers):
            try:
                logger(dict(record))
            except Exception as error:
                self._loggers.remove(logger)
                kind = type(logger).__qualname__
                name = logger.name if isinstance(logger, Tracker) else getattr(logger, "__qualname__", kind)
                log.warning(
                    "the logger %s raised at step %d and gets no more records, training goes on: %s",
                    *(name, self._step, one_line(error)),
                )

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """The last record."""
        self.write({"kind": "end", "step": self._step, "status": status, "summary": summary})
        self._loggers = []


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
    if name not in _KINDS:
        raise unknown("logger", name, _KINDS)
    return _KINDS[name](place or None, every=every)


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


class Log:
    """Hands the replica's numbers, and yours, to loggers.

        with thinwire.Log(replica, ["tensorboard"], out="runs/mine") as log:
            for x, y in loader:
                …
                optimizer.step()
                log.step(loss=loss)

    Only rank 0 logs; on other workers every call does nothing. None of them is collective. Make it after
    `replica.load`, so that a resumed run goes on in the same run of the tracker. With `faults=` another worker becomes
    rank 0 when its group is lost, and goes on in the same way.
    """

    def __init__(
        self,
        replica: Replica,
        loggers: Iterable[str | Logger],
        *,
        out: str | Path,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`out` names the run and its group, and is where TensorBoard writes; `config` are settings to show."""
        self._replica, self._out, self._config = replica, Path(out), dict(config or {})
        self._given = list(chosen(loggers))  # until they begin
        self._loggers = Loggers()
        self._records = Arriving(lambda record: self._loggers.write(record))  # those of the moment
        self._began = time.monotonic()
        if self._given and replica.topology.rank == 0:
            self._begin(resumed=replica.step > 0)

    def step(self, **values: Any) -> None:
        """Numbers of the step that was just taken, such as loss=loss; tensors of one number are not waited for."""
        self._write("step", values)

    def evaluation(self, **values: Any) -> None:
        """Numbers of an evaluation, such as accuracy=0.9."""
        self._write("evaluation", values)

    def close(self, summary: Mapping[str, Any] | None = None, status: str = "finished") -> None:
        """End the run in the trackers; `summary` are its results."""
        if self._is_logging:
            self._records.flush()
            self._loggers.end(status, dict(summary or {}))
        self._loggers, self._given = Loggers(), []

    @property
    def _is_logging(self) -> bool:
        """Whether this worker is rank 0 now; begins its loggers if it has become that."""
        if self._replica.topology.rank != 0:
            return False
        if self._given:
            try:
                self._begin(resumed=True)
            except Exception as error:  # the run is under way
                log.warning("loggers could not go on after the loss of rank 0, training does: %s", one_line(error))
        return bool(self._loggers)

    def _begin(self, *, resumed: bool) -> None:
        self._loggers, self._given = Loggers(self._given), []
        about, size = self._replica.describe(), self._replica.topology.world_size
        settings = {"method": about["method"], **about["config"], "world_size": size, **self._config}
        begin(self._loggers, self._replica, self._out, settings, resumed=resumed)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._is_logging:
            replica = self._replica
            about = {"kind": kind, "step": replica.step, "phase": replica.phase}
            self._records.put(
                {**about, **replica.numbers(), "wall_s": round(time.monotonic() - self._began, 3), **values}
            )

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(status="failed" if error else "finished")


def begin(loggers: Loggers, replica: Replica, out: Path, config: dict[str, Any], *, resumed: bool) -> None:
    """Begin a run that has the name of its folder, in the group of the folder above."""
    place = out.resolve()
    if not resumed:
        (out / FILE).unlink(missing_ok=True)  # ids of an earlier run
    loggers.begin(
        name=place.name,
        group=place.parent.name,
        out=str(out),
        step=replica.step,
        resumed=resumed,
        config=config,
        phases=list(replica.phases),
    )
