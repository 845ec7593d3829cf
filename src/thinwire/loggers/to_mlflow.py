"""MLflow."""

from __future__ import annotations

import os
import time
from typing import Any

from thinwire.loggers.tracker import PROJECT, Record, Tracker, results, safe, settings

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_AT_ONCE = 1000
"""Numbers that MLflow takes in one call."""
_WAIT_S = 5.0
"""A call to its database takes some 15 ms of the processor, however little it writes."""
_LONGEST = 6000


class MLflow(Tracker):
    """A run in the experiment `place`, where MLFLOW_TRACKING_URI says. Numbers go there in batches."""

    name = "mlflow"
    _client: Any
    _run_id: str

    def begin(self, record: Record) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._waiting: list[Any] = []
        self._sent: list[Any] = []
        self._sent_at = time.monotonic()
        if earlier := self.earlier(record):
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
            return
        tags = {"group": record["group"]} if record["group"] else {}
        self._run_id = self._client.create_run(self._experiment(), run_name=record["name"], tags=tags).info.run_id
        params = [Param(safe(name), str(value)[:_LONGEST]) for name, value in settings(record).items()]
        self._client.log_batch(self._run_id, params=params)
        self.remember(record, self._run_id)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self.place or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        try:
            return found.experiment_id if found else self._client.create_experiment(name)
        except MlflowException:  # another process has just made it
            return self._client.get_experiment_by_name(name).experiment_id

    def write(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._waiting += [Metric(safe(name), float(value), now, step) for name, value in values.items()]
        if len(self._waiting) >= _AT_ONCE or time.monotonic() - self._sent_at > _WAIT_S:
            self._send()

    def _send(self) -> None:
        """In MLflow's own thread: a server may be far away."""
        while self._waiting:
            part, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            self._sent.append(self._client.log_batch(self._run_id, metrics=part, synchronous=False))
        self._sent_at = time.monotonic()

    def end(self, record: Record) -> None:
        if found := results(record):
            self.write(record["step"], found)
        self._send()
        for operation in self._sent:
            operation.wait()
        self._client.set_terminated(self._run_id, _STATUS[record["status"]])
