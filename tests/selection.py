"""Which cases `make test` runs: one of each kind. The rest of a matrix is for `make test-all` alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

REST = (pytest.mark.slow, pytest.mark.rest)


def slow_but(quick: Collection[str], cases: Iterable[str]) -> list[Any]:
    """The cases, all but the quick ones marked as the rest."""
    return [case if case in quick else pytest.param(case, marks=REST) for case in cases]


def first_of(cases: Iterable[Any]) -> list[Any]:
    """The cases, all but the first marked as the rest; a tuple is several arguments."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=REST if number else ()) for number, case in enumerate(several)]


cases_of_integrations = pytest.mark.parametrize(
    ("workers", "names"),
    [
        pytest.param(2, ["ab"], marks=pytest.mark.slow),
        pytest.param(2, ["allreduce"], marks=pytest.mark.slow),
        # After a save, as after a load, DDP begins anew: all-reduce of four workers is rounded otherwise than without.
        pytest.param(4, ["ab", "diloco"], marks=pytest.mark.slow),
    ],
)
"""Workers, and methods by name."""
