"""VGG16-BN on CIFAR-10 by any method: accuracy, bytes and size, with the AB paper's optimizer settings.

torchrun --nproc-per-node 4 benchmarks/vgg16_cifar10.py --data DIR --method ab --epochs 40 --json FILE
torchrun --nproc-per-node 4 benchmarks/vgg16_cifar10.py --data DIR --method topk --optimizer sgd --lr 0.1 --json FILE

DIR holds cifar10_train_1.npz … cifar10_train_5.npz and cifar10_test.npz. Several workers may share one GPU: gloo then
carries CUDA tensors through the host, which costs time and changes nothing else.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models import VGG16
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import thinwire
from thinwire.comm.topology import join
from thinwire.methods.registry import METHODS
from thinwire.settings import from_strings
from thinwire.train.schedule import cosine

CLIP = 1.0
USUAL = {"adamw": (3e-3, 0.1), "sgd": (0.1, 5e-4)}
"""Learning rate and weight decay where none are given: the AB paper's, and what VGGs on CIFAR-10 usually have."""
MEAN, DEVIATION = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)


def main() -> None:
    """One run."""
    options = _options()
    join()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    train, test = _load(options.data, device, options.samples)
    if options.validate:
        kept = len(train[0]) - len(train[0]) // 10
        train, test = (train[0][:kept], train[1][:kept]), (train[0][kept:], train[1][kept:])
    per_epoch = len(train[0]) // options.batch
    steps = options.epochs * per_epoch
    model = VGG16().to(device)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
    optimizer = _optimizer(model, options)
    rising = steps / 15 if options.warmup_epochs is None else options.warmup_epochs * per_epoch
    scheduler = cosine(optimizer, steps=steps, warmup=round(rising))
    given = dict(text.split("=", 1) for text in options.set)
    size = None if options.group_size is None else _number(options.group_size)
    config = from_strings(METHODS[options.method].config, given, total_steps=steps, group_size=size, clip=CLIP)
    replica = thinwire.attach(model, optimizer, config)
    start = time.perf_counter()
    curve, ranks = _train(replica, optimizer, scheduler, train, test, steps, options)
    _tell(replica, test, options, steps, curve, ranks, time.perf_counter() - start)


def _optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=options.lr, weight_decay=options.decay, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.decay)


def _train(
    replica: thinwire.Replica,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    steps: int,
    options: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    curve, ranks, (x, y) = [], list[dict[str, Any]](), train
    per_epoch = steps // options.epochs
    rank, workers = replica.topology.rank, replica.topology.world_size
    for step in range(steps):
        order = torch.Generator().manual_seed(options.seed * 1000 + step // per_epoch)
        indices = torch.randperm(len(x), generator=order)[step % per_epoch * options.batch :][: options.batch]
        mine = indices.tensor_split(workers)[rank].to(x.device)
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(replica(_augment(x[mine])), y[mine], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        if not replica.clips:
            nn.utils.clip_grad_norm_(replica.parameters(), CLIP)
        replica.observe(loss)
        optimizer.step()
        scheduler.step()
        if (now := replica.ranks()) and (not ranks or now != ranks[-1]["ranks"]):
            ranks.append({"step": step + 1, "ranks": now})
        if (step + 1) % (5 * per_epoch) == 0:
            with replica.merged():
                accuracy = _accuracy(replica, test)
            curve.append({"step": step + 1, "accuracy": accuracy, "slow_bytes": replica.traffic.slow_bytes})
            if rank == 0:
                print(options.method, curve[-1], replica.phase, f"{loss.item():.3f}", flush=True)
    return curve, ranks


def _tell(
    replica: thinwire.Replica,
    test: tuple[Tensor, Tensor],
    options: argparse.Namespace,
    steps: int,
    curve: list[dict[str, Any]],
    ranks: list[dict[str, Any]],
    seconds: float,
) -> None:
    with replica.merged():
        before = _accuracy(replica, test)
    small = replica.finish()
    ledger, told, baseline = replica.mean_traffic(), replica.describe(), replica.baseline()
    traffic = ledger.summary()
    sent = traffic["slow_bytes"] - traffic["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)
    result = {
        "method": options.method,
        "set": options.set,
        "optimizer": options.optimizer,
        "lr": options.lr,
        "decay": options.decay,
        "warmup_epochs": options.warmup_epochs,
        "batch": options.batch,
        "seed": options.seed,
        "epochs": options.epochs,
        "steps": steps,
        "seconds": seconds,
        "accuracy": _accuracy(replica, test),
        "accuracy_before_truncation": before,
        "slow_bytes": sent,
        "workers": replica.topology.world_size,
        "validated": options.validate,
        **{f"traffic_vs_{name}": sent / max(1, value) for name, value in baseline.items()},
        "compression": told["parameters_full"] / sum(p.numel() for p in small.parameters()),
        "traffic": traffic,
        "time": ledger.split,
        "ranks": ranks,
        "described": told,
        "curve": curve,
    }
    if replica.topology.rank == 0:
        shown = (
            "method",
            "set",
            "seed",
            "accuracy",
            "accuracy_before_truncation",
            "traffic_vs_allreduce_fp32",
        )
        print({k: result[k] for k in (*shown, "traffic_vs_ideal_fp32", "compression", "seconds")}, flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(result, indent=1))


@torch.no_grad()
def _accuracy(replica: thinwire.Replica, test: tuple[Tensor, Tensor]) -> float:
    replica.eval()
    with torch.autocast(test[0].device.type, torch.bfloat16):
        hits = sum(int((replica(x).argmax(1) == y).sum()) for x, y in zip(*(t.split(1000) for t in test), strict=True))
    replica.train()
    return hits / len(test[0])


def _augment(x: Tensor) -> Tensor:
    """Flip and crop, each image by itself."""
    flip = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    x = F.pad(torch.where(flip, x.flip(3), x), (4, 4, 4, 4))
    down, right = (torch.randint(0, 9, (len(x), 1, 1, 1), device=x.device) for _ in range(2))
    rows = torch.arange(32, device=x.device).view(1, 1, 32, 1) + down
    columns = torch.arange(32, device=x.device).view(1, 1, 1, 32) + right
    image, channel = (
        torch.arange(len(x), device=x.device).view(-1, 1, 1, 1),
        torch.arange(3, device=x.device).view(1, 3, 1, 1),
    )
    return x[image, channel, rows, columns]


def _load(
    folder: Path, device: torch.device, samples: int | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    parts = [_read(folder / f"cifar10_train_{k}.npz", samples) for k in range(1, 6 if samples is None else 2)]
    train = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    both = (train, _read(folder / "cifar10_test.npz", samples))
    first, second = (tuple(t.to(device) for t in pair) for pair in both)
    return first, second  # type: ignore[return-value]


def _read(file: Path, samples: int | None) -> tuple[Tensor, Tensor]:
    """Pixels are stored as wrap-around differences: along rows and columns, red and blue against green."""
    stored = np.load(file)
    x = np.cumsum(np.cumsum(stored["d"], 2, dtype=np.uint8), 3, dtype=np.uint8).transpose(1, 0, 2, 3).copy()
    x[:, ::2] += x[:, 1:2]
    scaled = (x[:samples] / np.float32(255) - np.float32(MEAN).reshape(1, 3, 1, 1)) / np.float32(DEVIATION).reshape(
        1, 3, 1, 1
    )
    return torch.from_numpy(scaled), torch.from_numpy(stored["y"][:samples].astype(np.int64))


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--method", choices=sorted(METHODS), default="ab")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=sorted(USUAL), default="adamw")
    parser.add_argument("--lr", type=float, help="highest learning rate; 3e-3 for adamw, 0.1 for sgd if not given")
    parser.add_argument("--decay", type=float, help="weight decay; 0.1 for adamw, 5e-4 for sgd if not given")
    parser.add_argument("--warmup-epochs", type=float, help="epochs over which it rises; a 15th if not given")
    parser.add_argument("--batch", type=int, default=1024, help="images a step, over all workers")
    parser.add_argument("--group-size")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--validate", action="store_true", help="judge on a tenth of the training images, kept out")
    parser.add_argument("--samples", type=int, help="only so many images, to try it out")
    parser.add_argument("--json")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parser.parse_args()
    lr, decay = USUAL[options.optimizer]
    options.lr = lr if options.lr is None else options.lr
    options.decay = decay if options.decay is None else options.decay
    return options


if __name__ == "__main__":
    main()
