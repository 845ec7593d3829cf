"""Train until the held-out loss is flat, make the model small, and train on until it is flat again.

torchrun --nproc-per-node 2 examples/unknown_length.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import thinwire
from thinwire.train import data

PATIENCE = 3  # evaluations without a lower loss


def main() -> None:
    """Train a small net on the digits that come with the package, without a number of steps."""
    torch.manual_seed(0)
    digits = data.digits(None)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, thinwire.AB(warmup=24, factor_at=None))  # no total_steps
    rank, workers = replica.topology.rank, replica.topology.world_size
    batches = data.Batches(size=digits.train_size, batch=64, seed=0)
    x_test, y_test = digits.heldout(range(rank, digits.heldout_size, workers))
    best, since = float("inf"), 0
    while since < PATIENCE:
        x, y = digits.train(data.share(batches.indices(replica.step), rank, workers))
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if replica.step % 24 == 0:
            with replica.merged(), torch.no_grad():  # each worker evaluates its share of the one merged model
                total = F.cross_entropy(replica(x_test), y_test, reduction="sum")
            if workers > 1:
                torch.distributed.all_reduce(total)  # the same on all workers, so all decide alike
            best, since = (total.item(), 0) if total < best else (best, since + 1)
            if rank == 0:
                print(f"step {replica.step:3d}  {replica.phase:8s} held-out loss {total / digits.heldout_size:.4f}")
            if since == PATIENCE and replica.phase == "local":
                replica.factor_now()  # at the next average; from here on ask for replica.parameters() again
                best, since = float("inf"), 0
    replica.finish()  # logs sizes and bytes


if __name__ == "__main__":
    main()
