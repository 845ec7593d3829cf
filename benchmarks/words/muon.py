"""Is Muon for hidden matrices better than AdamW alone where groups average rarely? A loop of its own, real workers.

    torchrun --nproc-per-node 4 benchmarks/words/muon.py --data TEXT_DIR --every 24 --optimizer muon

It prints one line of JSON with the perplexity on the validation part and the bytes that left a node. `--every 0` is
all-reduce; one worker without torchrun does that fastest. Muon's rate is AdamW's, by its rule "match_rms_adamw".
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import thinwire
from thinwire.experiments import data
from thinwire.experiments.text import GPT
from thinwire.train.data import Text
from thinwire.train.schedule import Cosine


def main() -> None:
    given = arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(given.seed)
    text = data.words(given.data, block=given.block).for_validation().to(device)
    sizes = {"block": given.block, "width": given.width, "depth": given.depth, "heads": 8, "dropout": 0.2}
    model = GPT(vocabulary=text.vocabulary, **sizes).to(device)
    optimizers = made(given.optimizer, model, given.lr)
    schedulers = [LambdaLR(o, lambda step: Cosine().factor(step, given.steps, 1.0)) for o in optimizers]
    replica = thinwire.attach(model, optimizers, config(given))
    torch.manual_seed(1000 * given.seed + rank)  # for dropout
    order = np.random.default_rng(given.seed)
    for _ in range(given.steps):
        mine = order.integers(text.train_size, size=given.batch)[rank::world]
        loss = loss_of(replica, *text.train(mine), device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    sent = replica.traffic.slow_bytes
    replica.finish()
    if rank == 0:
        found = {"optimizer": given.optimizer, "every": given.every, "lr": given.lr, "seed": given.seed, "bytes": sent}
        print(json.dumps(found | {"workers": world, "perplexity": perplexity(model, text, given.batch, device)}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--every", type=int, default=24)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--second-moment", choices=("group", "estimate", "shared"), default="shared")
    for name, value in (("lr", 2e-3), ("seed", 0), ("steps", 2550), ("batch", 64), ("block", 128)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    for name, value in (("width", 256), ("depth", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def made(name: str, model: nn.Module, lr: float) -> list[Optimizer]:
    """AdamW for everything, or for what Muon is not made for: embeddings, biases and norms."""
    hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("layers.")]
    if name == "adamw":
        return [AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)]
    rest = [p for p in model.parameters() if all(p is not h for h in hidden)]
    muon = Muon(hidden, lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.1)]


def config(given: argparse.Namespace) -> Any:
    if not given.every:
        return thinwire.AllReduce()
    return thinwire.LocalSGD(
        every=given.every,
        wire="int2",
        warmup=0.05,
        warmup_wire="lowrank:16",
        total_steps=given.steps,
        second_moment=given.second_moment,
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor, device: torch.device, reduction: str = "mean") -> Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


@torch.no_grad()
def perplexity(model: nn.Module, text: Text, batch: int, device: torch.device) -> float:
    model.eval()
    total = 0.0
    for start in range(0, text.heldout_size, batch):
        windows = np.arange(start, min(start + batch, text.heldout_size))
        total += float(loss_of(model, *text.heldout(windows), device, "sum"))
    return math.exp(total / (text.heldout_size * text.block))


if __name__ == "__main__":
    main()
