"""Checksums after an average: a bit that differs on one worker is found, on all workers, by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gang
import small
import thinwire
from thinwire import AB, ConfigError, DiLoCo, DisagreementError, LocalSGD
from thinwire.exchange.averaged import AveragedTensors

ODD = 1


def flip(t: Tensor, bit: int = 0) -> None:
    """One bit of the last value."""
    t.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1 << bit)


def break_at(number: int, where: str) -> None:
    """From now on flip a bit in this worker's `number`th average: in what it received, or in what it made of it."""
    counts = {"receive": 0, "move": 0}
    receive, move = AveragedTensors.receive, AveragedTensors.move

    def received(self: Any) -> bool:
        sound = receive(self)
        counts["receive"] += 1
        if where == "received" and counts["receive"] == number:
            flip(self.scratch, 20)  # a lower one may be rounded away, and then does no harm
        return sound

    def moved(self: Any, *args: Any) -> None:
        move(self, *args)
        counts["move"] += 1
        if counts["move"] == number and where != "received":
            flip(self.momentum if where == "momentum" else self.tensors()[0])

    AveragedTensors.receive, AveragedTensors.move = received, moved  # type: ignore[method-assign]


def train(rank: int, config: Any, where: str | None, number: int = 2) -> Any:
    """What was raised and when, or the bits and the bytes at the end."""
    kept = AveragedTensors.receive, AveragedTensors.move
    if where and rank == ODD:
        break_at(number, where)
    model = small.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = thinwire.attach(model, optimizer, config)
    try:
        for _ in small.walk(replica, optimizer, rank, 12):
            pass
        replica.finish()
    except DisagreementError as error:
        return replica.step, str(error)
    finally:
        AveragedTensors.receive, AveragedTensors.move = kept  # type: ignore[method-assign]
    return small.model_bits(replica.module), replica.traffic.slow_bytes_for("checksums")


def flips(rank: int) -> dict[str, Any]:
    local, outer = LocalSGD(every=2, group_size=1, checksum_every=2), DiLoCo(every=2, wire="int8", group_size=1)
    compared = DiLoCo(every=2, wire="int8", group_size=1, checksum_every=1)
    return {
        "parameter": train(rank, local, "parameter"),
        "received": train(rank, compared, "received"),
        "momentum": train(rank, compared, "momentum"),
        "healthy": train(rank, compared, None),
        "plain": train(rank, outer, None),
        "not compared": train(rank, outer, "received"),
    }


def test_a_bit_that_differs_is_found_at_the_next_comparison() -> None:
    for found in gang.run(flips, 3):
        for name, first in (
            ("parameter", "parameter 'stem.weight'"),
            ("received", "parameter 'head.bias'"),
            ("momentum", "the outer momentum of 'head.bias'"),
        ):
            step, said = found[name]
            assert step == 4 and "after the average at step 4: rank 1 not those of the 2 others" in said, (name, said)
            assert f"first in {first}." in said and "resume from a checkpoint" in said, (name, said)
        (bits, sent), (plain, usual) = found["healthy"], found["plain"]
        assert bits == plain and sent - usual == 6 * 2 * 16, "six comparisons of 16 bytes, to each of two others"
        step, said = found["not compared"]
        assert step == 12 and "finish()" in said, "without it the same bit is found at the very end"


def pair(rank: int) -> Any:
    ab = AB(total_steps=12, warmup=0, every=2, factor_at=4, cutoff=0.6, group_size=1, checksum_every=3)
    return train(rank, ab, "received", 4)


@pytest.mark.slow
def test_of_two_workers_nobody_knows_whose_bits_are_right() -> None:
    for step, said in gang.run(pair, 2):
        assert step in (6, 12) and "rank 1 not those of rank 0, and no majority says whose are right" in said


def test_how_often_is_a_whole_number() -> None:
    for wrong in (0, 1.5, True, "often"):
        with pytest.raises(ConfigError, match=r"`checksum_every`=.* must be a whole number from 1 on"):
            LocalSGD(checksum_every=wrong)  # type: ignore[arg-type]
