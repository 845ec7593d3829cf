"""Workers with fewer batches than others end cleanly, and all hold one model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR

import gang
import small
import thinwire
from thinwire import AB, DASO, OIALR, AllReduce, ConfigError, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import desloc
import gossip
import slowmo

BATCHES = (7, 5, 9)
CONFIGS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "bf16": AllReduce(wire="bf16", group_size=1),
    "int8": AllReduce(wire="int8", group_size=1),
    "powersgd": PowerSGD(rank=2, warmup=6, group_size=1),
    "onebit": OneBit(warmup=3, group_size=1),
    "local": LocalSGD(every=4, group_size=1),
    "warmed": LocalSGD(every=2, warmup=6, group_size=1, moments="average"),
    "one group": DiLoCo(every=4, group_size="world"),
    "diloco": DiLoCo(every=3, wire="int4", group_size=1),
    "streaming": DiLoCo(every=4, fragments=2, overlap=1, wire="int8", group_size=1),
    "ab": AB(total_steps=20, warmup=2, every=2, factor_at=4, cutoff=0.6, group_size=1),
    "oialr": OIALR(total_steps=20, factor_at=4, redecompose=3, cutoff=0.3, layer_fraction=0.5, group_size=1),
    "a method of one's own": gossip.Gossip(every=3, group_size=1),
    "desloc": desloc.DesLoc(every=3, every_first=2, every_second=4, group_size=1),
    "slowmo": slowmo.SlowMo(every=3, group_size=1),
}


def epochs(rank: int, config: Any, batches: tuple[int, ...], *, joins: bool = True, scheduled: bool = False) -> Any:
    """Two epochs of so many batches on each worker; bits after each and at the end."""
    model = small.net(smooth=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = thinwire.attach(model, optimizer, config)
    scheduler = CosineAnnealingLR(optimizer, 20) if scheduled else ConstantLR(optimizer, 1.0)
    seen = []
    for epoch in range(2):
        if joins:
            with replica.join():
                for number in range(batches[rank]):
                    small.step(replica, optimizer, rank, 100 * epoch + number)
                    scheduler.step()
        else:
            for number in range(batches[rank]):
                small.step(replica, optimizer, rank, 100 * epoch + number)
                scheduler.step()
        seen.append((replica.step, replica.in_sync, small.model_bits(model), small.optimizer_bits(optimizer)))
    replica.finish()
    return seen, small.model_bits(replica.module), all(bool(p.isfinite().all()) for p in replica.module.parameters())


def several(rank: int, names: list[str], scheduled: bool) -> Any:
    found = []
    for name in names:
        config = CONFIGS[name]
        even = (5, 5, 5)
        found.append(
            [
                epochs(rank, config, BATCHES, scheduled=scheduled),
                epochs(rank, config, even, scheduled=scheduled),
                epochs(rank, config, even, joins=False, scheduled=scheduled),
            ]
        )
    return found


def check(names: list[str], *, scheduled: bool = False) -> None:
    by_rank = gang.run(several, 3, names, scheduled, patience=30, timeout=120)
    for i, name in enumerate(names):
        uneven = [worker[i][0] for worker in by_rank]
        assert len({final for _, final, _ in uneven}) == 1 and all(finite for *_, finite in uneven), name
        for epoch in range(2):
            seen = [epochs[epoch] for epochs, *_ in uneven]
            assert {step for step, *_ in seen} == {9 * (epoch + 1)}, (name, seen)
            if seen[0][1]:  # in sync
                assert len(set(seen)) == 1, f"{name}: one model and one optimizer state after epoch {epoch}"
        for worker in by_rank:
            assert worker[i][1] == worker[i][2], f"{name}: with equally many batches nothing changes"


def test_workers_with_fewer_batches_wait_for_the_others() -> None:
    check(["allreduce", "local"])


@pytest.mark.slow
def test_schedules_by_batch_that_end_apart() -> None:
    check(["allreduce", "local", "warmed"], scheduled=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("allreduce", "local")])
def test_every_method_that_can_join(name: str) -> None:
    check([name])


def sent(rank: int, config: Any, batches: tuple[int, ...]) -> list[list[Any]]:
    """The ledger's rows after uneven inputs, without seconds."""
    model = small.net(smooth=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = thinwire.attach(model, optimizer, config)
    with replica.join():
        for number in range(batches[rank]):
            small.step(replica, optimizer, rank, number)
    return [row[:-1] for row in replica.traffic.state()["rows"]]


def test_members_of_a_node_count_the_same() -> None:
    """Also the one that neither gives nor takes a model at the end: the second of two that have most batches."""
    found = gang.run(sent, 4, AllReduce(group_size=2), (3, 3, 1, 2), patience=30, timeout=120)
    assert found[0] == found[1] and found[2] == found[3]
    assert any(row[1:3] == ["join", "slow"] for row in found[1])


def handed_over(rank: int, giver: int, members: tuple[int, ...]) -> tuple[Any, int]:
    """Some bytes of one worker, a few at a time; and what left this node for them."""
    model = small.net(smooth=True)
    replica = thinwire.attach(model, torch.optim.AdamW(model.parameters()), AllReduce(group_size=2))
    payload = torch.arange(250, dtype=torch.uint8) if rank == giver else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thinwire.comm.wire._PIECE", 100)
        content = replica.wire.broadcast_bytes(payload, members, "handed")
    sent = replica.traffic.by_purpose["handed"]["slow_bytes"]
    replica.detach()
    return None if content is None else content.tolist(), sent


def test_what_is_handed_over_crosses_once_for_each_node() -> None:
    found = gang.run(handed_over, 4, 1, (1, 2, 3))
    assert [content for content, _ in found] == [None, *[list(range(250))] * 3]
    here, there = (sent for _, sent in found[::2])
    assert here - there == 250  # beside the size, and where all workers meet between pieces
    assert found[1][1] == here


def resumed(rank: int, folder: str) -> str:
    """A worker that has sat out steps is known for it after a save."""
    for epoch in range(2):
        model = small.net(smooth=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        replica = thinwire.attach(model, optimizer, CONFIGS["local"])
        scheduler = CosineAnnealingLR(optimizer, 20)
        if epoch:
            replica.load(folder, also={"scheduler": scheduler})
        with replica.join():
            for number in range(BATCHES[rank]):
                small.step(replica, optimizer, rank, 100 * epoch + number)
                scheduler.step()
        if not epoch:
            replica.save(folder, also={"scheduler": scheduler})
            replica.detach()
    return small.model_bits(replica.finish())


@pytest.mark.slow
def test_schedules_that_end_apart_resume(tmp_path: Path) -> None:
    assert len(set(gang.run(resumed, 3, str(tmp_path / "save")))) == 1


class Counting(nn.Module):
    """Its gradient is the mean of its inputs, so that it is seen who counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def weights(rank: int, config: Any, falls: float = 1.0) -> list[float]:
    """After two epochs. Worker r has 3 - r batches, each of which would move the weight by 10 to the power of r.

    Each worker's rate falls by this factor with each of its own batches.
    """
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = thinwire.attach(model, optimizer, config)
    scheduler = LambdaLR(optimizer, lambda step: falls**step)
    for _ in range(2):
        with replica.join():
            for _ in range(3 - rank):
                optimizer.zero_grad()
                replica(-torch.full((1,), 10.0**rank)).backward()
                optimizer.step()
                scheduler.step()
    return [replica.step, model.weight.item()]


def both_weights(rank: int) -> list[Any]:
    apart = LocalSGD(every=1, group_size=1)
    return [weights(rank, config, falls) for falls in (1.0, 0.5) for config in (AllReduce(), apart)]


def own_weights(rank: int) -> list[Any]:
    """Of `LocalSGD`, and of two examples that are the same with these settings."""
    ways = [LocalSGD(every=1, group_size=1), desloc.DesLoc(every=1, group_size=1)]
    return [weights(rank, config, 0.5) for config in (*ways, slowmo.SlowMo(every=1, beta=0.0, group_size=1))]


@pytest.mark.slow
def test_who_counts_in_a_mean_of_ones_own() -> None:
    for built_in, *own in gang.run(own_weights, 3):
        assert own == [pytest.approx(built_in)] * 2


def test_who_counts_in_a_mean() -> None:
    """Gradients are divided by all workers, averages of parameters by the groups that have trained.

    The world's rate is that of the worker with most batches; a group's is its own.
    """
    for gradients, averages, slower, apart in gang.run(both_weights, 3):
        assert gradients == pytest.approx([6, 2 * (111 + 11 + 1) / 3])
        assert averages == pytest.approx([6, 2 * (111 / 3 + 11 / 2 + 1)])
        assert slower == pytest.approx([6, (1 + 1 / 8) * (111 + 11 / 2 + 1 / 4) / 3])
        first, second = (111 / 3 + 11 / 4 + 1 / 4), (100 / 2 + 10 / 4 + 1 / 8) / 3 + (10 / 8 + 1 / 16) / 2 + 1 / 32
        assert apart == pytest.approx([6, first + second])


def refused(rank: int) -> list[str]:
    said = []
    for config in (
        TopK(density=0.1),
        DASO(total_steps=20),
        thinwire.AB.paper(total_steps=20, warmup=3, every=4, rebound=2),
        LocalSGD(every=2, group_size=2),
        LocalSGD(every=2, group_size=1, rows="seen"),
        AB(total_steps=20, group_size=1, every=2, train="split"),
    ):
        model = small.net()
        replica = thinwire.attach(model, small.sgd(model), config)
        with pytest.raises(ConfigError) as caught, replica.join():
            pass
        said.append(str(caught.value))
        replica.detach()
    return said


def test_what_cannot_join_is_refused_by_name() -> None:
    for said in gang.run(refused, 4):
        for message, name in zip(
            said, ("TopK", "DASO", "PaperAB", "groups of several workers", "rows='seen'", "train='split'"), strict=True
        ):
            assert name in message and "give all workers equally many batches" in message


def test_one_worker_joins_itself() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2))
    with replica.join():
        small.step(replica, optimizer, 0, 0)
        with pytest.raises(thinwire.ThinwireError, match="one around the loop"), replica.join():
            pass
    assert replica.step == 1
    replica.finish()
