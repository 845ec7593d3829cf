"""A sweep of models nobody here wrote for Thinwire, by every method: workers agree, and end with one model."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import many
import small
import thinwire
import zoo_forwards  # noqa: F401 - it fills SHAPES, as those below do
import zoo_images  # noqa: F401
import zoo_parameters  # noqa: F401
import zoo_words  # noqa: F401
from covering import Case, cases, gangs
from every_method import ALL_WAYS, STEPS, WAYS, engine
from zoo import ADAMW, SHAPES, tensors_of

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, int | None]] = {"two workers": (2, None), "four in pairs": (4, 2)}
"""Workers, and how many are in a group."""

EXPECTED = ("is not known to follow a change of shape", "Grad strides do not match bucket view strides")
"""Warnings that may be seen; the second is DDP's, about factors of rank 1, whose strides mean nothing."""


def train(rank: int, name: str, way: str, group_size: int | None) -> dict[str, Any]:
    """All steps of a model by a method, with digests of everything after each; then the finished model's."""
    about, found = SHAPES[name], []
    model = about.build()
    optimizer = about.optimizer([p for p in model.parameters() if p.requires_grad])
    config = ALL_WAYS[way].config(group_size=group_size)
    replica = thinwire.attach(model, optimizer, config, ddp=about.ddp or None)
    for step in range(STEPS):
        rng = torch.Generator().manual_seed(1000 * rank + step)
        loss = about.loss(replica, about.batch(rng), rank, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert torch.isfinite(loss), f"the loss is {loss} at step {step + 1}"
        found.append(look(replica, [optimizer]))
    sent = replica.traffic.slow_bytes
    return {"steps": found, "sent": sent, "finished": finished(replica.finish(), name)}


def look(replica: Any, optimizers: list[Any]) -> dict[str, Any]:
    """What a worker holds now, in a few words."""
    return {
        "phase": replica.phase,
        "spans world": replica.in_sync,
        "parameters": digest(replica.parameters()),
        "buffers": digest(replica.buffers()),
        "optimizer": " ".join(map(optimizer_digest, optimizers)),
    }


def digest(tensors: Any) -> str:
    """A digest of values; of any dtype."""
    return small.bits(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()))


def optimizer_digest(optimizer: Any) -> str:
    """A digest of the optimizer's state, in the order of its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [sorted(optimizer.state.get(p, {}).items()) for p in parameters]
    return digest(torch.as_tensor(value) for state in states for _, value in state if value is not None)


def finished(model: nn.Module, name: str) -> dict[str, Any]:
    """Digests of a finished model, of what it puts out, and of the same from its state in a copy."""
    batch = SHAPES[name].batch(torch.Generator().manual_seed(7))
    before = [type(module).__module__ for module in model.modules()]
    assert not any(module.startswith("thinwire") for module in before), "a layer of Thinwire's is left"
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    model.eval()
    with torch.no_grad():
        output = tensors_of(model(**batch) if isinstance(batch, dict) else model(batch))
    finite = all(bool(torch.isfinite(t).all()) for t in output)
    held = {"model": digest(model.parameters()), "buffers": digest(model.buffers())}
    return {**held, "output": digest(output), "finite": finite}


def ways_for(name: str) -> dict[str, Any]:
    """The methods that take a shape's optimizer."""
    return ALL_WAYS if SHAPES[name].optimizer is ADAMW else WAYS


def matrix() -> list[Case]:
    """Every shape, method and layout; with what the method is built on, and the file that the shape is in."""
    return [
        {"shape": name, "way": way, "layout": layout, "engine": engine(way), "zoo": about.zoo}
        for name, about in SHAPES.items()
        for way in ways_for(name)
        for layout in LAYOUTS
    ]


# Every shape meets every engine in every layout; every method each layout and the shapes of each file.
KEYS = [(str(case["shape"]), str(case["way"]), str(case["layout"])) for case in cases(matrix(), [("shape", "way")])]
GANGS = gangs(KEYS, lambda key: key[2])


@functools.cache
def trained(keys: tuple[tuple[str, str, str], ...]) -> list[dict[str, many.Outcome]]:
    """Cases of one layout, in one gang."""
    workers, group_size = LAYOUTS[keys[0][2]]
    with tempfile.TemporaryDirectory() as folder:
        return many.run(train, workers, {f"{key}": (*key[:2], group_size) for key in keys}, Path(folder))


KNOWN: dict[tuple[str, str], str] = {}
"""Shapes and methods that are broken, and how."""


def params() -> list[Any]:
    """What is due, with a mark where it is known to fail."""
    marks = {key: pytest.mark.xfail(strict=True, reason=reason) for key, reason in KNOWN.items()}
    return [pytest.param(*key, id="-".join(key), marks=marks.get(key[:2], ())) for key in KEYS]


@pytest.mark.parametrize(("name", "way", "layout"), params())
def test_workers_agree(name: str, way: str, layout: str) -> None:
    key = (name, way, layout)
    check(name, way, [worker[f"{key}"] for worker in trained(GANGS[key])])


def check(name: str, way: str, outcomes: list[many.Outcome]) -> None:
    """No error but one that is due, and agreement wherever the method promises it."""
    if wanted := SHAPES[name].refused.get(way):
        said = [outcome.error.partition("ConfigError: ")[2] for outcome in outcomes]
        assert all(wanted in text for text in said), f"{wanted!r} is due, it said {said}"
        return
    found = many.values(outcomes, EXPECTED)
    agree(way, found)
    assert found[0]["finished"]["finite"]


def agree(way: str, found: list[dict[str, Any]]) -> None:
    """Workers hold the same wherever the method promises it, have been through every phase, and sent something."""
    for step, states in enumerate(zip(*(worker["steps"] for worker in found), strict=True), 1):
        for what in ("parameters", "buffers", "optimizer"):
            if states[0]["spans world"] or getattr(ALL_WAYS[way], what)(step):
                assert len({state[what] for state in states}) == 1, f"{what} differ after step {step}"
    assert {state["phase"] for state in found[0]["steps"]} == ALL_WAYS[way].phases
    assert all(worker["finished"] == found[0]["finished"] for worker in found), "finished models differ"
    assert all(worker["sent"] > 0 for worker in found), "the ledger is empty"
