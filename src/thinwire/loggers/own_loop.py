"""Loggers in a loop of one's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.base.errors import one_line
from thinwire.loggers.arriving import Arriving
from thinwire.loggers.choice import chosen
from thinwire.loggers.fanout import Logger, Loggers
from thinwire.loggers.tracker import FILE
from thinwire.replica.replica import Replica

log = logging.getLogger("thinwire")


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
