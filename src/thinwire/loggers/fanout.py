"""Several loggers as one, of which none can end the training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from thinwire.base.errors import ConfigError, ThinwireError, one_line
from thinwire.loggers.tracker import Record, Tracker

log = logging.getLogger("thinwire")

Logger = Callable[[Record], Any]
"""Called with each record, in the process of rank 0."""


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
                log.warning(
                    "the logger %s raised at step %d and gets no more records, training goes on: %s",
                    name_of(logger),
                    self._step,
                    one_line(error),
                )

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """The last record."""
        self.write({"kind": "end", "step": self._step, "status": status, "summary": summary})
        self._loggers = []


def name_of(logger: Logger) -> str:
    """For a message."""
    if isinstance(logger, Tracker):
        return logger.name
    return getattr(logger, "__qualname__", type(logger).__qualname__)
