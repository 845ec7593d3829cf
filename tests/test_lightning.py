"""Lightning with Thinwire: the same parameters as by a loop of one's own, through its checkpoints too."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gang
import needs
import small
import thinwire
from selection import cases_of_integrations
from thinwire import AB, AllReduce, DiLoCo

needs.package("lightning", "Lightning")

STEPS, EPOCH = 12, 6
"""Two epochs; Lightning resumes where one begins, since it does not know which batches a loader has given."""
WAYS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "diloco": DiLoCo(every=3, warmup=2, wire="int4", group_size=1),
    "ab": lambda steps: AB(total_steps=steps, warmup=2, every=3, factor_at=0.4, cutoff=0.5, group_size=1),
}


def rate(step: int) -> float:
    return 1 - step / (STEPS + 1)


def module() -> Any:
    import lightning.pytorch as pl

    class Digits(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small.net()

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("missed", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), 3e-3)
            return [optimizer], [{"scheduler": LambdaLR(optimizer, rate), "interval": "step"}]

    return Digits()


def loader(rank: int, workers: int) -> Any:
    x, y = zip(*(small.batch(0, number, 1) for number in range(8 * EPOCH * workers)), strict=True)
    data = TensorDataset(torch.cat(x), torch.cat(y))
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, workers, rank, shuffle=False))


def fitted(rank: int, workers: int, config: Any, folder: Path, resume: bool = False) -> Any:
    """As under torchrun."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(workers))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GROUP_RANK="0", TORCHELASTIC_RUN_ID="here")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireNumbers, ThinwireStrategy

    warnings.simplefilter("ignore")
    model = module()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    trainer = pl.Trainer(
        strategy=ThinwireStrategy(config),
        accelerator="cpu",
        devices=workers,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[keep, ThinwireNumbers()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=2,
        use_distributed_sampler=False,
    )
    saved = str(folder / f"step={EPOCH}.ckpt") if resume else None
    trainer.fit(model, loader(rank, workers), loader(rank, workers), ckpt_path=saved)
    assert trainer.callback_metrics["slow_bytes"] > 0 and 0 < trainer.callback_metrics["traffic_vs_allreduce_fp32"] < 2
    return model, trainer.callback_metrics["missed"]


def by_hand(rank: int, workers: int, config: Any) -> str:
    model = module()
    optimizer = AdamW(model.parameters(), 3e-3)
    scheduler = LambdaLR(optimizer, rate)
    replica = thinwire.attach(model, optimizer, config(STEPS) if callable(config) else config)
    for number, (x, y) in enumerate(2 * list(loader(rank, workers))):
        if number % 2 == 0:
            with replica.no_sync():
                (F.cross_entropy(replica(x), y) / 2).backward()
            continue
        (F.cross_entropy(replica(x), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    replica.finish()
    return small.model_bits(model.net)


def compared(rank: int, workers: int, names: list[str], folder: Path) -> dict[str, Any]:
    found = {}
    for name in names:
        model, missed = fitted(rank, workers, WAYS[name], folder / name)
        again, _ = fitted(rank, workers, WAYS[name], folder / name, resume=True)
        plain = module()
        plain.load_state_dict(torch.load(folder / name / "step=6.ckpt", weights_only=False)["state_dict"])
        bits = {small.model_bits(model.net), small.model_bits(again.net), by_hand(rank, workers, WAYS[name])}
        found[name] = bits, float(missed)
    return found


@cases_of_integrations
def test_parameters_are_those_of_a_loop_of_ones_own(workers: int, names: list[str], tmp_path: Path) -> None:
    everyone = gang.run(compared, workers, workers, names, tmp_path, fresh=True)
    for name in names:
        assert len(set.union(*(each[name][0] for each in everyone))) == 1, name
        assert len({each[name][1] for each in everyone}) == 1, name
