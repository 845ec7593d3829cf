"""Weights & Biases."""

from __future__ import annotations

import os
import secrets
from typing import Any

from thinwire.loggers.tracker import PROJECT, Record, Tracker, results, settings


class WandB(Tracker):
    """A run in the project `place`; offline where WANDB_MODE=offline."""

    name = "wandb"
    _run: Any

    def begin(self, record: Record) -> None:
        import wandb

        identity = self.earlier(record) or secrets.token_hex(4)
        self._run = wandb.init(
            project=self.place or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=record["name"],
            group=record["group"] or None,
            config=settings(record),
            id=identity,
            resume="allow",
            reinit="create_new",  # a run that the user's own code has open is left alone
            settings=wandb.Settings(console="off"),
        )
        # Its own counter only grows, and a resumed run goes back to its last save.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.remember(record, identity)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values | {"step": step})

    def end(self, record: Record) -> None:
        self._run.summary.update(results(record))
        self._run.finish(exit_code=int(record["status"] == "failed"))
