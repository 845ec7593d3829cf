"""Time series held in memory: the ETT data of transformers' temperatures, by quarters of an hour."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.comm.topology import place
from thinwire.train.data import how_to_fill, rows_on, unpacked_text
from thinwire.train.step_rng import StepRNG

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
_ORIGIN = "https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small"
_MONTH = 30 * 24 * 4
_STEP = timedelta(minutes=15)
log = logging.getLogger("thinwire")


@dataclass(frozen=True, kw_only=True)
class Series:
    """A series of several variables; an example is a window, which may start at any row of its part.

    `x` is (examples, inputs + horizon, variables + marks) with zeros for the values to come, which are `y`,
    (examples, horizon, variables). Every window counts. The published loaders of ETT drop the last batch that is not
    full, in some versions in the test too: at batches of 32 one window of 11,425.
    """

    values: Tensor
    """The variables, (rows, variables), standardised by the rows that are trained on."""
    marks: Tensor
    """Time features of each row, (rows, marks), from −0.5 to 0.5."""
    mean: Tensor
    """Of each variable, before standardising."""
    deviation: Tensor
    """Of each variable, before standardising."""
    train_rows: np.ndarray
    """Rows at which training windows start."""
    validation_rows: np.ndarray
    """Rows at which validation windows start; their inputs may be in the part before, their targets are not."""
    heldout_rows: np.ndarray
    """Rows at which held-out windows start, likewise."""
    inputs: int
    """Rows whose values are known."""
    label: int
    """The last of them that a decoder starts from; not used here."""
    horizon: int
    """Rows whose values are predicted."""

    @property
    def train_size(self) -> int:
        return len(self.train_rows)

    @property
    def validation_size(self) -> int:
        return len(self.validation_rows)

    @property
    def heldout_size(self) -> int:
        return len(self.heldout_rows)

    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        return self._windows(self.train_rows[indices])

    def validation(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._windows(self.validation_rows[indices])

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._windows(self.heldout_rows[indices])

    def for_validation(self) -> Series:
        """The validation part held out."""
        return replace(self, heldout_rows=self.validation_rows)

    def to(self, device: torch.device | str) -> Series:
        """The same series on `device`."""
        moved = {name: getattr(self, name).to(device) for name in ("values", "marks", "mean", "deviation")}
        return replace(self, **moved)

    def _windows(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        device = self.values.device
        rows = rows_on(device, starts)[:, None] + torch.arange(self.inputs + self.horizon, device=device)
        known = self.values[rows[:, : self.inputs]]  # (examples, inputs, variables)
        x = torch.cat([F.pad(known, (0, 0, 0, self.horizon)), self.marks[rows]], 2)
        return x, self.values[rows[:, self.inputs :]]


def ett(folder: Path | None, *, inputs: int = 96, label: int = 48, horizon: int = 96, name: str = "ETTm2") -> Series:
    """ETTm2 or, by its `name`, ETTm1: 12 months to train on, 4 to validate and 4 held out, of 30 days each.

    Data after these 20 months is not used, as in the papers. A shorter file is cut at 60 and 80 %, with a warning: its
    figures cannot be compared with published ones.
    """
    if min(inputs, horizon) < 1:
        raise ConfigError(f"`inputs`={inputs} and `horizon`={horizon} must be whole numbers from 1 on")
    path = _find(name, folder)
    dates, table = _read(path)
    ends = _ends(len(table), path)
    train, validation, heldout = _starts(ends, inputs, horizon, path)
    trained = table[: ends[0]]
    mean, deviation = trained.mean(0), trained.std(0)
    # A constant variable (up to rounding) is only shifted, as in scikit-learn's StandardScaler.
    deviation[deviation <= 1e-12 * np.abs(mean)] = 1
    return Series(
        values=_float((table - mean) / deviation),
        marks=_float(np.array([time_marks(date) for date in dates])),
        mean=_float(mean),
        deviation=_float(deviation),
        train_rows=train,
        validation_rows=validation,
        heldout_rows=heldout,
        inputs=inputs,
        label=label,
        horizon=horizon,
    )


def time_marks(date: datetime) -> tuple[float, ...]:
    """Minute, hour, day of the week, of the month and of the year, each from −0.5 to 0.5: GluonTS's for minutes."""
    day_of_year = date.timetuple().tm_yday
    shares = (date.minute / 59, date.hour / 23, date.weekday() / 6, (date.day - 1) / 30, (day_of_year - 1) / 365)
    return tuple(share - 0.5 for share in shares)


def _ends(rows: int, path: Path) -> tuple[int, int, int]:
    """Where the three parts end."""
    whole = 20 * _MONTH
    if rows >= whole:
        return 12 * _MONTH, 16 * _MONTH, whole
    first, second = rows * 6 // 10, rows * 8 // 10
    here = place()
    if here is None or here.rank == 0:
        log.warning(
            "`%s` has %d rows, not the %d of 20 months: split into %d to train on, %d to validate and %d held out "
            "(60, 20 and 20 %%), not into 12, 4 and 4 months; fetch it again if it should be whole",
            *(path, rows, whole, first, second - first, rows - second),
        )
    return first, second, rows


def _starts(ends: tuple[int, int, int], inputs: int, horizon: int, path: Path) -> Iterator[np.ndarray]:
    """The rows at which the windows of each part begin. But for the first, a part's inputs reach back before it."""
    begins = (0, ends[0] - inputs, ends[1] - inputs)
    for part, begin, end in zip(("train on", "validate on", "hold out"), begins, ends, strict=True):
        if end - begin < inputs + horizon:
            raise ConfigError(
                f"`{path}` has {ends[-1]} rows, too few for a window of {inputs} + {horizon} to {part}; "
                "give a longer file or set a smaller `inputs` or `horizon`"
            )
        yield np.arange(begin, end - inputs - horizon + 1)


def _find(name: str, folder: Path | None) -> Path:
    """`name`.csv, or the same packed, in `folder`."""
    for suffix in (".csv", ".csv.gz"):
        path = Path(folder or ".") / f"{name}{suffix}"
        if folder is not None and path.is_file():
            return path
    where = f"no `{name}.csv` and no `{name}.csv.gz` in `{folder}`" if folder else f"`{name}.csv` is not in the package"
    raise ConfigError(f"{where}. {how_to_fill(folder, {f'{name}.csv': f'{_ORIGIN}/{name}.csv'})}")


def _read(path: Path) -> tuple[list[datetime], np.ndarray]:
    """The dates, and the values of `COLUMNS` as (rows, variables) in fp64."""
    try:
        rows = [(line, *_parsed(path, line, fields)) for line, fields in _rows(path, unpacked_text(path))]
    except csv.Error as error:
        raise ConfigError(f"`{path}` is not a table ({error}); download it again") from error
    for (_, before, _), (line, date, _) in pairwise(rows):
        if date - before != _STEP:
            raise ConfigError(
                f"`{path}`, line {line}: {date} follows {before}, where each row must be {_STEP} after the last, "
                "as windows go by rows; fetch the file again, or fill the gap"
            )
    return [date for _, date, _ in rows], np.array([values for *_, values in rows]).reshape(-1, len(COLUMNS))


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """The number of each line that is not empty, and its date and values in the order of `COLUMNS`."""
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next(reader, [])
    wanted = ("date", *COLUMNS)
    if missing := [column for column in wanted if column not in header]:
        found = f"`{path}`, line 1: no column `{missing[0]}` in `{','.join(header)}`"
        raise ConfigError(f"{found}; the first line must name {', '.join(wanted)}")
    places = [header.index(column) for column in wanted]
    for fields in filter(None, reader):
        if len(fields) != len(header):
            line = f"`{path}`, line {reader.line_num}"
            raise ConfigError(f"{line}: {len(fields)} values where the first line names {len(header)} columns")
        yield reader.line_num, [fields[place] for place in places]


def _parsed(path: Path, line: int, fields: list[str]) -> tuple[datetime, list[float]]:
    try:
        date, values = datetime.fromisoformat(fields[0]), [float(field) for field in fields[1:]]
    except ValueError as error:
        raise _wrong(path, line, fields) from error
    if date.tzinfo or not all(map(math.isfinite, values)):
        raise _wrong(path, line, fields)
    return date, values


def _wrong(path: Path, line: int, fields: list[str]) -> ConfigError:
    """The error that names the first value that is not a number, or else the date."""
    for column, field in zip(COLUMNS, fields[1:], strict=True):
        if not _is_number(field):
            return ConfigError(f"`{path}`, line {line}: `{column}` is `{field}`, which is not a finite number")
    return ConfigError(
        f"`{path}`, line {line}: `date` is `{fields[0]}`, which is not a date such as 2016-07-01 00:15:00"
    )


def _is_number(field: str) -> bool:
    try:
        return math.isfinite(float(field))
    except ValueError:
        return False


def _float(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))
