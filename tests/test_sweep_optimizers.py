"""Every optimizer with state per element by every method: stopped in the middle of a phase and resumed, bit for bit."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import many
import small
import thinwire
from covering import WHOLE, cases, gangs
from every_method import ALL_WAYS, STEPS, WAYS, engine
from test_sweep import EXPECTED, agree, look

pytestmark = pytest.mark.slow

STOPS = (5, 10) if WHOLE else (10,)
"""In a group phase, with something under way, between averages; then again, one cycle later."""


def _of(kind: str, **settings: Any) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [getattr(torch.optim, kind)(model.parameters(), **settings)]


def _muon_beside_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon takes matrices only; the rest is AdamW's."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "sgd": _of("SGD", lr=0.02),
    "sgd nesterov": _of("SGD", lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": _of("Adam", lr=1e-3, weight_decay=1e-3),
    "adamw": _of("AdamW", lr=1e-3),
    "adamw amsgrad": _of("AdamW", lr=1e-3, amsgrad=True),
    "adamw foreach": _of("AdamW", lr=1e-3, foreach=True),
    "adamw fused": _of("AdamW", lr=1e-3, fused=True),
    "adam with a tensor for its rate": lambda model: [torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3))],
    "nadam": _of("NAdam", lr=1e-3),
    "radam": _of("RAdam", lr=1e-3),
    "adamax": _of("Adamax", lr=1e-3),
    "adagrad": _of("Adagrad", lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": _of("Adadelta", lr=1.0),
    "rmsprop": _of("RMSprop", lr=1e-3, momentum=0.9, centered=True),
    "rprop": _of("Rprop", lr=1e-3),
    "asgd": _of("ASGD", lr=1e-2),
    "adafactor": _of("Adafactor", lr=1e-2),
    "muon beside adamw": _muon_beside_adamw,
}


def build(kind: str, way: str, seed: int) -> tuple[Any, list[Optimizer], Any]:
    """A replica whose model starts from values of its own."""
    model = small.net(seed)
    optimizers = OPTIMIZERS[kind](model)
    given = optimizers[0] if len(optimizers) == 1 else optimizers
    return thinwire.attach(model, given, ALL_WAYS[way].config()), optimizers, []  # type: ignore[arg-type]


def advance(replica: Any, optimizers: list[Optimizer], rank: int, end: int) -> list[dict[str, Any]]:
    """Steps up to `end`, with a look after each."""
    seen = []
    for number in range(replica.step, end):
        x, y = small.batch(rank, number)
        loss = torch.nn.functional.cross_entropy(replica(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.isfinite(loss), f"the loss is {loss} at step {number + 1}"
        seen.append(look(replica, optimizers))
    return seen


def stop_and_resume(rank: int, kind: str, way: str, folder: str) -> dict[str, Any]:
    """An unbroken run that saves at both stops; then a fresh replica from each save, which saves as the other did."""
    replica, optimizers, seen = build(kind, way, seed=0)
    for stop in STOPS:
        seen += advance(replica, optimizers, rank, stop)
        replica.save(Path(folder) / str(stop))
    seen += advance(replica, optimizers, rank, STEPS)
    found = {"steps": seen, "sent": replica.traffic.slow_bytes, "resumed": {}}
    found["finished"] = look_at_finished(replica)
    for stop in STOPS:
        found["resumed"][stop] = resume(rank, kind, way, folder, stop)
    return found


def look_at_finished(replica: Any) -> str:
    """All that is left in the end."""
    return small.model_bits(replica.finish())


def resume(rank: int, kind: str, way: str, folder: str, stop: int) -> list[dict[str, Any]]:
    """The steps after a save, by a replica that knew nothing of those before."""
    replica, optimizers, seen = build(kind, way, seed=7)
    replica.load(Path(folder) / str(stop))
    for later in (s for s in STOPS if s > stop):
        seen += advance(replica, optimizers, rank, later)
        replica.save(Path(folder) / "again")
    seen += advance(replica, optimizers, rank, STEPS)
    replica.detach()
    return seen


def ways_for(kind: str) -> dict[str, Any]:
    """The methods that take an optimizer."""
    return ALL_WAYS if "adamw" in kind or kind.split()[0] == "adam" else WAYS


MATRIX = [{"kind": kind, "way": way, "engine": engine(way)} for kind in OPTIMIZERS for way in ways_for(kind)]
# Every optimizer meets every engine, by one method or another.
KEYS = [(str(case["kind"]), str(case["way"])) for case in cases(MATRIX, [("kind", "way")])]
GANGS = gangs(KEYS, lambda key: 2)


@functools.cache
def swept(keys: tuple[tuple[str, str], ...]) -> list[dict[str, many.Outcome]]:
    """Optimizers by methods, in one gang."""
    with tempfile.TemporaryDirectory() as folder:
        homes = {key: Path(folder) / "-".join(key) for key in keys}
        for home in homes.values():
            home.mkdir()
        return many.run(stop_and_resume, 2, {f"{key}": (*key, str(home)) for key, home in homes.items()}, Path(folder))


KNOWN: dict[tuple[str, str], str] = {}
"""Optimizers and methods that are broken, and how."""


def params() -> list[Any]:
    """What is due, with a mark where it is known to fail."""
    marks = {key: pytest.mark.xfail(strict=True, reason=why) for key, why in KNOWN.items()}
    return [pytest.param(*key, id="-".join(key), marks=marks.get(key, ())) for key in KEYS]


@pytest.mark.parametrize(("kind", "way"), params())
def test_resuming_equals_never_having_stopped(kind: str, way: str) -> None:
    key = (kind, way)
    found = many.values([worker[f"{key}"] for worker in swept(GANGS[key])], EXPECTED)
    agree(way, found)
    for worker in found:
        for stop, seen in worker["resumed"].items():
            for step, (unbroken, resumed) in enumerate(zip(worker["steps"][stop:], seen, strict=True), stop + 1):
                wrong = [what for what in unbroken if unbroken[what] != resumed[what]]
                assert not wrong, f"resumed after step {stop}: {', '.join(wrong)} differ after step {step}"
