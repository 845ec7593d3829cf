"""Many cases in one gang of workers: each in a world of its own, and one that fails leaves the others alone."""

import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import gang


class Outcome(NamedTuple):
    """What became of a case on one worker."""

    value: Any
    error: str
    warned: list[str]


def run(
    case: Callable[..., Any], workers: int, cases: Mapping[str, tuple[Any, ...]], folder: Path, patience: float = 30
) -> list[dict[str, Outcome]]:
    """Call `case(rank, *arguments)` for each of `cases` in the same workers; what became of each, by rank."""
    worlds = folder / "worlds"
    worlds.mkdir(exist_ok=True)
    return gang.run(_worker, workers, case, dict(cases), str(worlds), workers, patience, timeout=900, fresh=True)


def _worker(
    rank: int, case: Callable[..., Any], cases: dict[str, tuple[Any, ...]], folder: str, workers: int, patience: float
) -> dict[str, Outcome]:
    found = {}
    _leave()
    for number, (name, arguments) in enumerate(cases.items()):
        # A world of its own: who waits for a worker that failed is told at once, as its connections close.
        store = dist.FileStore(str(Path(folder) / str(number)), workers)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=patience))
        dist.barrier()  # all have come before the first may leave
        found[name] = _outcome(case, rank, arguments)
        dist.destroy_process_group()
    return found


def _leave() -> None:
    """End the gang's own world, when all are in it."""
    dist.barrier()
    dist.destroy_process_group()


def _outcome(case: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> Outcome:
    value, error = None, ""
    torch.manual_seed(rank)
    torch.set_warn_always(True)  # what torch says once in a process concerns every case
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = case(rank, *arguments)
        except Exception:
            error = traceback.format_exc()
    return Outcome(value, error, sorted({f"{w.category.__name__}: {w.message}" for w in caught}))


def values(outcomes: Iterable[Outcome], expected: tuple[str, ...] = ()) -> list[Any]:
    """What a case returned on every worker; fails with the first worker's own error, or a warning nobody expects."""
    outcomes = list(outcomes)
    errors = [(rank, outcome.error) for rank, outcome in enumerate(outcomes) if outcome.error]
    # Whose connection was closed only heard of it.
    errors.sort(key=lambda found: "Connection closed" in found[1] or "Connection reset" in found[1])
    if errors:
        pytest.fail(f"rank {errors[0][0]}:\n{errors[0][1]}", pytrace=False)
    odd = {text for outcome in outcomes for text in outcome.warned if not any(part in text for part in expected)}
    assert not odd, f"warnings that nobody expects: {odd}"
    return [outcome.value for outcome in outcomes]
