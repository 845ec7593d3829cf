"""A list of parameters from before factoring clips nothing any more, and a script that uses one is told."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import small
import thinwire

WAYS: dict[str, Any] = {
    "ab": lambda: thinwire.AB(total_steps=60, warmup=2, every=3, factor_at=4, cutoff=0.6),
    "paper": small.ab,
    "oialr": lambda: thinwire.OIALR(total_steps=30, factor_at=6, cutoff=0.6),
}


def trained(config: Any, habit: str) -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    before = {"kept": list(model.parameters()), "by name": dict(model.named_parameters())}.get(habit)
    if habit == "a list that is only kept":
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.05)
    replica = thinwire.attach(model, optimizer, config)
    losses = []
    for number in range(18):
        x, y = small.batch(0, number)
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        if habit == "losses with their graphs":
            losses.append(loss)
        kept = list(before.values()) if isinstance(before, dict) else before
        nn.utils.clip_grad_norm_(kept if kept is not None else model.parameters(), 1.0)
        optimizer.step()
        if habit == "loads what it has":
            optimizer.load_state_dict(optimizer.state_dict())
            model.load_state_dict(model.state_dict())
    if habit == "a list that is only kept":
        assert sum(p.numel() for p in params) == sum(p.numel() for p in small.mlp().parameters())
    replica.detach()


@pytest.mark.parametrize("habit", ["kept", "by name"])
@pytest.mark.parametrize("way", WAYS)
def test_a_script_that_keeps_old_parameters_is_told_once(way: str, habit: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        trained(WAYS[way](), habit)
    (told,) = [record.getMessage() for record in caplog.records if "clip_grad_norm_" in record.getMessage()]
    assert "clip_grad_norm_(model.parameters(), …)" in told


@pytest.mark.parametrize(
    "habit", ["asks each time", "losses with their graphs", "a list that is only kept", "loads what it has"]
)
@pytest.mark.parametrize("way", WAYS)
def test_others_are_not(way: str, habit: str, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        trained(WAYS[way](), habit)
    assert not [record for record in caplog.records if "clip_grad_norm_" in record.getMessage()]
