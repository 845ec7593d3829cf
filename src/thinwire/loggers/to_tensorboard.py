"""TensorBoard: an events file in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.loggers.tracker import Record, Tracker, results, settings

SUFFIX = ".thinwire"
"""Of the events files that are ours: others are left alone."""
_FLUSH_S = 10


class TensorBoard(Tracker):
    """Writes to the run's folder, or to DIR/GROUP/NAME if `place` is a folder DIR."""

    name = "tensorboard"
    _writer: Any

    def begin(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.place) / record["group"] / record["name"] if self.place else Path(record["out"])
        # What was written there for later steps is hidden, in a new run for all.
        purge = record["step"] + 1 if record["resumed"] else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=_FLUSH_S, filename_suffix=SUFFIX)
        self._settings = settings(record)

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all of them: a call of `add_scalar` for each takes several times as long.
        parts = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=parts), step)

    def end(self, record: Record) -> None:
        found = results(record)
        if found:
            self.write(record["step"], found)
            self._add_settings(found)
        self._writer.close()

    def _add_settings(self, found: dict[str, float]) -> None:
        """For the page HParams, in the same file: `add_hparams` would make a run of its own for them."""
        from torch.utils.tensorboard.summary import hparams

        for part in hparams(self._settings, found):
            self._writer.file_writer.add_summary(part)
