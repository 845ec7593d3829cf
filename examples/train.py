"""A whole training script: the loop one has for DDP, with one line changed.

torchrun --nproc-per-node 4 examples/train.py
python examples/train.py                        # one process works too
"""

import logging

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import thinwire
from thinwire.train import data

STEPS = 300


def main() -> None:
    """Train a small net on the digits that come with the package."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    digits = data.digits(None)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 64, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.5)
    scheduler = OneCycleLR(optimizer, max_lr=2e-3, total_steps=STEPS)

    replica = thinwire.attach(model, optimizer, thinwire.AB(total_steps=STEPS))  # was: DDP(model)

    rank, workers = replica.topology.rank, replica.topology.world_size
    batches = data.Batches(size=digits.train_size, batch=64, seed=0)
    for step in range(STEPS):
        x, y = digits.train(data.share(batches.indices(step), rank, workers))
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and step % 50 == 0:
            print(
                f"step {step:3d}  {replica.phase:8s} loss {loss.item():.3f}  {replica.traffic.slow_bytes / 1e6:.1f} MB"
            )

    small = replica.finish().eval()
    if rank == 0:
        x, y = digits.heldout(range(digits.heldout_size))
        with torch.no_grad():
            accuracy = (small(x).argmax(1) == y).float().mean()
        print(f"accuracy {accuracy:.2%} with {sum(p.numel() for p in small.parameters()):,} parameters")


if __name__ == "__main__":
    main()
