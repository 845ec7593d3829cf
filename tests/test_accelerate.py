"""Accelerate with Thinwire: the same parameters as by a loop of one's own, through its checkpoints too."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import gang
import needs
import small
import thinwire
from selection import cases_of_integrations
from thinwire import AB, AllReduce, ConfigError, DiLoCo

needs.package("accelerate", "Accelerate")

STEPS = 12
WAYS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "diloco": DiLoCo(every=4, warmup=2, wire="int4", group_size=1),
    "ab": AB(total_steps=STEPS, warmup=2, every=2, factor_at=0.5, cutoff=0.5, group_size=1),
}


def made(rank: int, workers: int, **settings: Any) -> tuple[Any, Any, Any, Any, Any]:
    """As under torchrun."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(workers))
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    x, y = zip(*(small.batch(0, number, 1) for number in range(8 * STEPS * workers)), strict=True)
    loader = DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=4)
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / (STEPS * workers + 1))
    return accelerator, model, optimizer, loader, scheduler


def accelerated(rank: int, workers: int, config: Any, folder: Path | None = None, resume: bool = False) -> str:
    from thinwire.integrations.accelerate import attached

    accelerator, model, optimizer, loader, scheduler = made(rank, workers)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    with attached(accelerator, model, optimizer, config) as replica:
        if resume:
            accelerator.load_state(str(folder))
            loader = accelerator.skip_first_batches(loader, 2 * replica.step)
        for x, y in loader:
            with accelerator.accumulate(replica):
                accelerator.backward(F.cross_entropy(replica(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(replica.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if folder is not None and not resume and replica.step == 7 and accelerator.sync_gradients:
                accelerator.save_state(str(folder))
    return small.model_bits(model)


def by_hand(rank: int, workers: int, config: Any) -> str:
    """The same with the loop's own means."""
    accelerator, model, optimizer, loader, scheduler = made(rank, workers)
    loader = accelerator.prepare(loader)
    replica = thinwire.attach(model, optimizer, config)
    for number, (x, y) in enumerate(loader):
        if number % 2 == 0:
            with replica.no_sync():
                (F.cross_entropy(replica(x), y) / 2).backward()
            continue
        (F.cross_entropy(replica(x), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        for _ in range(workers):  # Accelerate's schedulers count the batches of all workers
            scheduler.step()
        optimizer.zero_grad()
    return small.model_bits(replica.finish())


def compared(rank: int, workers: int, names: list[str], folder: Path) -> dict[str, set[str]]:
    return {
        name: {
            by_hand(rank, workers, WAYS[name]),
            accelerated(rank, workers, WAYS[name], folder / name),
            accelerated(rank, workers, WAYS[name], folder / name, resume=True),
        }
        for name in names
    }


@cases_of_integrations
def test_parameters_are_those_of_a_loop_of_ones_own(workers: int, names: list[str], tmp_path: Path) -> None:
    everyone = gang.run(compared, workers, workers, names, tmp_path, fresh=True)
    for name in names:
        assert len(set.union(*(each[name] for each in everyone))) == 1, name


def refused(rank: int) -> list[str]:
    from thinwire.integrations.accelerate import attached

    said = []
    accelerator, model, optimizer, *_ = made(rank, 2)
    wrapped = accelerator.prepare(model)
    with pytest.raises(ConfigError) as caught, attached(accelerator, model, optimizer, AllReduce()):
        pass
    said.append(str(caught.value))
    with pytest.raises(ConfigError), attached(accelerator, wrapped, optimizer, AllReduce()):
        pass
    accelerator, model, optimizer, *_ = made(rank, 2)
    with pytest.raises(ZeroDivisionError), attached(accelerator, model, optimizer, AllReduce()):
        raise ZeroDivisionError
    with attached(accelerator, model, optimizer, AllReduce()):  # it was detached
        pass
    return said


def test_what_would_go_around_the_replica_is_refused() -> None:
    for (said,) in gang.run(refused, 2, fresh=True):
        assert "the model was given to accelerator.prepare()" in said
        assert "prepare the optimizer, loader and scheduler only" in said
