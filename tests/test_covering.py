"""The cases that stand for a matrix: every pair that can occur, each time the same, and fewer than all."""

import itertools

import pytest

import covering
import test_foreign_optimizers
import test_sweep
import test_sweep_loops
import test_sweep_optimizers

ALLOWED: list[covering.Case] = [
    {"a": a, "b": b, "c": c} for a, b, c in itertools.product("uvwxyz", range(5), (True, False)) if (a, b) != ("x", 3)
]


def test_every_pair_that_is_allowed_occurs_and_none_that_is_not() -> None:
    found = covering.covering(ALLOWED)
    wanted = set().union(*map(covering.pairs, ALLOWED))
    assert set().union(*map(covering.pairs, found)) == wanted
    assert all(case in ALLOWED for case in found)
    assert len(found) == 6 * 5 - 1  # the two largest factors, without what is not allowed
    assert len(wanted) == 6 * 5 - 1 + 6 * 2 + 5 * 2


def test_the_same_is_chosen_each_time_and_values_are_used_alike() -> None:
    found = covering.covering(ALLOWED, [("a", "b")])
    assert found == covering.covering(ALLOWED, [("a", "b")])
    assert len(found) == 6 * 2
    times = [sum(case["b"] == b for case in found) for b in range(5)]
    assert min(times) == 2 and max(times) == 3


def test_each_value_of_a_place_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "WHOLE", False)
    cases = [("a", "x", 1), ("a", "y", 2), ("b", "x", 3), ("b", "y", 4), ("c", "y", 5)]
    assert covering.each(cases, place=0) == [cases[0], cases[2], cases[4]]
    assert covering.each(cases, place=1) == cases[:2]


def test_a_gang_has_cases_that_are_alike_and_not_too_many() -> None:
    gangs = covering.gangs(range(10), lambda number: number % 2, size=3)
    assert gangs[0] == gangs[4] == (0, 2, 4) and gangs[9] == (7, 9)
    assert set(gangs) == set(range(10)) and all(case in gang for case, gang in gangs.items())


def test_the_sweeps_have_every_method_and_every_subject_with_every_engine() -> None:
    for matrix, subject in (
        (test_sweep.matrix(), "shape"),
        (test_sweep_loops.MATRIX, "loop"),
        (test_sweep_optimizers.MATRIX, "kind"),
        (test_foreign_optimizers.MATRIX, "kind"),
    ):
        found = covering.covering(matrix, [(subject, "way")])
        assert {case["way"] for case in found} == {case["way"] for case in matrix}
        assert {(case[subject], case["engine"]) for case in found} == {
            (case[subject], case["engine"]) for case in matrix
        }
        assert len(found) < len(matrix) / 3
