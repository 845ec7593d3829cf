"""What the Python of the documentation takes for granted: a model, an optimizer, batches, tiny ones."""

import os
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import small
import thinwire
from doc_pages import ROOT

_PASS = r"\1optimizer.zero_grad()\n\1loss_fn(replica(x), y).backward()"
STEPS = 120


def runnable(code: str) -> str:
    """A line of dots is a pass through the model; a length left open, and one of thousands of steps, are short."""
    code = re.sub(r"^( *)…$", _PASS, code, flags=re.MULTILINE).replace("total_steps=…", f"total_steps={STEPS}")
    code = code.replace("steps=300", "steps=300, generations=1")
    return re.sub(r"total_steps=(10_000|2000|1000)\b", f"total_steps={STEPS}", code).replace("warmup=200", "warmup=4")


def names(page: str, rank: int) -> dict[str, Any]:
    """The names that blocks of a page use without saying where they come from."""
    model = small.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given: dict[str, Any] = {
        "__name__": "__main__",
        "torch": torch,
        "thinwire": thinwire,
        "F": F,
        "Net": small.mlp,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "OneCycleLR": torch.optim.lr_scheduler.OneCycleLR,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": [small.batch(rank, step) for step in range(STEPS)],
        "loss_fn": F.cross_entropy,
        "epochs": 1,
        "total_steps": STEPS,
    }
    return given | _OF_PAGES.get(page, lambda given: {})(given)


def _your_loop(given: dict[str, Any]) -> dict[str, Any]:
    matrices = [p for p in given["model"].parameters() if p.ndim == 2]
    own = f"pretrained-{os.getpid()}.pt"
    torch.save(given["model"].state_dict(), own)
    os.replace(own, "pretrained.pt")  # whole at any time: others write it too

    def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return {
        "hidden_matrices": matrices,
        "everything_else": [p for p in given["model"].parameters() if p.ndim != 2],
        "evaluate": lambda replica: 0.0,
        "is_flat": lambda loss: False,
        "train": train,
        "batches": given["loader"][:4],
    }


def _faults(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "set_rate": lambda step: None,
        "batch": lambda step: given["loader"][step],
        "replica": thinwire.attach(given["model"], given["optimizer"], thinwire.AllReduce()),
    }


def _logging(given: dict[str, Any]) -> dict[str, Any]:
    replica = thinwire.attach(given["model"], given["optimizer"], thinwire.AllReduce())
    return {"replica": replica, "loss": torch.tensor(1.0), "accuracy": 0.5}


def _extending(given: dict[str, Any]) -> dict[str, Any]:
    sys.path.append(str(ROOT / "examples"))
    from gossip import Gossip

    return {"Gossip": Gossip}


def _optimizers(given: dict[str, Any]) -> dict[str, Any]:
    import pytorch_optimizer

    return {"pytorch_optimizer": pytorch_optimizer}


def _daso(given: dict[str, Any]) -> dict[str, Any]:
    return {"epochs": 6, "loader": given["loader"][: STEPS // 6]}


def _small_models(given: dict[str, Any]) -> dict[str, Any]:
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 10))
    example = torch.zeros(2, 3, 32, 32)
    thinwire.compress(images, rank=4, example=example, keep_first=False, keep_last=False).save("small")
    return {"pixels": torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "loader": given["loader"][:2]}


_OF_PAGES = {
    "docs/your-loop.md": _your_loop,
    "docs/faults.md": _faults,
    "docs/logging.md": _logging,
    "docs/extending.md": _extending,
    "docs/optimizers.md": _optimizers,
    "docs/methods/daso.md": _daso,
    "docs/small-models.md": _small_models,
}
