"""A state or an evaluation of one group's model is reported once, with what gives that of all groups."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
import small
import thinwire

CONFIGS = {
    "localsgd": lambda: thinwire.LocalSGD(warmup=2, every=4, group_size=1),
    "diloco": lambda: thinwire.DiLoCo(warmup=0, every=4, fragments=2, overlap=1, group_size=1),
    "daso": lambda: thinwire.DASO(total_steps=20, warmup=2, cooldown=2, every=4, overlap=2, group_size=1),
    "ab": lambda: small.ab(group_size=1),
}


AGREED = {"localsgd": (1, 2, 6), "diloco": (), "daso": (1, 2), "ab": (1, 3, 7, 8, 9)}
"""Steps after which groups hold the same model: in a warm-up, right after an average, before they train apart."""


class Heard(logging.Handler):
    """What was said of one group only."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("thinwire").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "its own group only" in record.getMessage():
            self.said.append(record.getMessage())


def evaluate(model: Any) -> None:
    """An evaluation as loops have them."""
    model.eval()
    with torch.no_grad():
        model(small.batch(0, 0)[0])
    model.train()


def quiet(rank: int, folder: str) -> list[str]:
    """All that is not of one group only, or Thinwire's own."""
    heard = Heard()
    for name, make in CONFIGS.items():
        model = small.net()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, make())
        ema = thinwire.EMA(replica, 0.9)
        for number in range(9):
            small.step(replica, optimizer, rank, number)
            ema.update_parameters(replica)
            ema.state_dict()
            evaluate(ema)
            if number + 1 in AGREED[name]:
                evaluate(replica)
                torch.save(model.state_dict(), Path(folder) / f"model{rank}.pt")
            with torch.no_grad():
                replica(small.batch(0, 0)[0])  # in train(): not an evaluation
        with replica.merged():
            evaluate(model)
            replica.state_dict()
        copied = copy.deepcopy(model)
        copied.state_dict()
        evaluate(copied)
        replica.save(Path(folder) / name)
        replica.load(Path(folder) / name)
        replica.finish()
        evaluate(replica)
        replica.state_dict()
    return heard.said


def apart(rank: int, what: str) -> list[str]:
    heard = Heard()
    for make in CONFIGS.values():
        model = small.net()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, make())
        for number in range(11):
            small.step(replica, optimizer, rank, number)
        for _ in range(2):
            if what == "evaluates":
                evaluate(replica)
                evaluate(model)
            else:
                replica.state_dict() if what == "replica" else torch.nn.ModuleList([model]).state_dict()
        replica.detach()
    return heard.said


@pytest.mark.slow
def test_merged_models_copies_and_own_saves_are_not_reported(tmp_path: Path) -> None:
    assert gang.run(quiet, 2, str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_a_state_or_an_evaluation_of_one_group_is_reported_once_on_rank_0() -> None:
    for what, words in (("evaluates", "this evaluation"), ("replica", "this state_dict()"), ("inside", "state_dict()")):
        first, second = gang.run(apart, 2, what)
        assert second == []
        assert len(first) == len(CONFIGS)
        assert all(words in text and "with replica.merged():" in text for text in first), first


def test_one_worker_has_nothing_to_report() -> None:
    assert gang.run(apart, 1, "evaluates") == [[]]
