"""CIFAR-10 for benchmarks: its images, one training loop for any model and method, and what a run tells.

A folder holds what `thinwire.train.data.cifar10` reads: cifar-10-batches-py, or cifar10_train_1.npz …
cifar10_train_5.npz and cifar10_test.npz. Several workers may share one GPU: gloo then carries CUDA tensors through the
host, which costs time and changes nothing else.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import thinwire
from thinwire.methods.registry import METHODS
from thinwire.report.heatmap import draw_looks
from thinwire.settings import from_strings
from thinwire.train import data
from thinwire.train.draws import Draws
from thinwire.train.views import Pictures

Images = tuple[Tensor, Tensor]
"""Images (n, 3, 32, 32) and their classes."""

SMOOTHING = 0.1


# Images.


def load(options: argparse.Namespace) -> tuple[Images, Images]:
    """Bytes to train on and to judge by, on the device if there is one."""
    source = data.cifar10(options.data).to("cuda" if torch.cuda.is_available() else "cpu")
    x, y = source.train(np.arange(source.train_size)[: options.samples])
    if options.validate:
        kept = len(x) - len(x) // 10
        return (x[:kept], y[:kept]), (x[kept:], y[kept:])
    return (x, y), source.heldout(np.arange(source.heldout_size)[: options.samples])


# A run.


def attach(
    model: nn.Module, optimizer: Optimizer, options: argparse.Namespace, steps: int, clip: float | None = None
) -> thinwire.Replica:
    """The replica that the command line asks for."""
    given = dict(text.split("=", 1) for text in options.set)
    size = None if options.group_size is None else _number(options.group_size)
    length = {"total_steps": steps, "steps_per_epoch": steps / options.epochs}
    config = from_strings(METHODS[options.method].config, given, **length, group_size=size, clip=clip)
    if options.compile:
        # Every change of ranks is another program.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    return thinwire.attach(model, optimizer, config, compile={} if options.compile else None)


class History:
    """What a run tells over time."""

    def __init__(self, replica: thinwire.Replica, options: argparse.Namespace) -> None:
        self.replica, self.options = replica, options
        self.curve: list[dict[str, Any]] = []
        self.ranks: list[dict[str, Any]] = []
        self.trainable: list[dict[str, Any]] = []
        self.stability: list[dict[str, Any]] = []
        self.seconds = self.seconds_evaluating = self.seconds_watching = 0.0
        self.peak_memory = 0
        self._full = sum(p.numel() for p in replica.module.parameters())
        self._ranks: dict[str, int] = {}
        self._watch = None
        if options.stability and replica.topology.rank == 0:
            self._watch = thinwire.Stability(replica, options.stability, options.stability_back)
        self._note_share(0)

    def after_step(self, step: int) -> None:
        """Note what has changed; waits for the device only where the bases are looked at."""
        if (now := self.replica.ranks()) != self._ranks:
            self._ranks = now
            self._note_share(step)
            if now and (not self.ranks or now != self.ranks[-1]["ranks"]):
                self.ranks.append({"step": step, "ranks": now})
        if self._watch and step % self._watch.every == 0:
            start = _clock()
            record = self._watch.look(step)
            self.stability += [record] if record else []
            self.seconds_watching += _clock() - start

    def evaluate(self, step: int, test: Images, **told: Any) -> None:
        """Judge the merged model."""
        start = _clock()
        peak = self.note_memory()
        with self.replica.merged():
            found = evaluate(self.replica, test, compiled=self.options.compile)
        sent = self.replica.traffic.slow_bytes
        self.curve.append({"step": step, **found, "slow_bytes": sent, "peak_memory": peak, **told})
        self._note_share(step)
        self.seconds_evaluating += _clock() - start
        if self.replica.topology.rank == 0:
            print(self.options.method, self.curve[-1], self.trainable[-1], self.replica.phase, flush=True)

    def note_memory(self) -> int | None:
        """The most bytes in use on the device since the last call."""
        if not torch.cuda.is_available():
            return None
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.peak_memory = max(self.peak_memory, peak)
        return peak

    def _note_share(self, step: int) -> None:
        trained = sum(p.numel() for p in self.replica.module.parameters() if p.requires_grad)
        if not self.trainable or self.trainable[-1]["step"] != step:
            self.trainable.append({"step": step, "share": trained / self._full})


def fit(
    replica: thinwire.Replica,
    optimizer: Optimizer,
    scheduler: LambdaLR,
    train: Images,
    test: Images,
    options: argparse.Namespace,
    *,
    views: Pictures,
    clip: float | None = None,
) -> History:
    """Train to the end. Images stay bytes; what a step shows of them is drawn for its whole batch."""
    history, (x, y) = History(replica, options), train
    per_epoch = len(x) // options.batch
    history.note_memory()
    start = _clock()
    for step, mine in enumerate(_batches(replica, x, options), start=1):
        images = views.train(x[mine], _draws(replica, step, options, x.device))
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(replica(images), y[mine], label_smoothing=SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None and not replica.clips:
            nn.utils.clip_grad_norm_(replica.parameters(), clip)
        replica.observe(loss)
        optimizer.step()
        scheduler.step()
        history.after_step(step)
        if step % per_epoch == 0:
            replica.epoch_end()
        if step % (options.evaluate_every * per_epoch) == 0:
            history.evaluate(step, test, train_loss=loss.item(), lr=scheduler.get_last_lr()[0])
    history.seconds = _clock() - start
    history.note_memory()
    return history


def _batches(replica: thinwire.Replica, x: Tensor, options: argparse.Namespace) -> Iterator[Tensor]:
    """This worker's images of each step; all workers draw the same order."""
    rank, workers = replica.topology.rank, replica.topology.world_size
    for epoch in range(options.epochs):
        order = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        indices = torch.randperm(len(x), generator=order).to(x.device)
        for k in range(len(x) // options.batch):
            yield indices[k * options.batch :][: options.batch].tensor_split(workers)[rank]


def _draws(replica: thinwire.Replica, step: int, options: argparse.Namespace, device: torch.device) -> Draws:
    place = {"rank": replica.topology.rank, "world_size": replica.topology.world_size}
    return Draws(options.seed, step, batch=options.batch, device=device, **place)


@torch.no_grad()
def evaluate(replica: thinwire.Replica, test: Images, *, compiled: bool = False) -> dict[str, float]:
    """Accuracies and losses. A compiled model runs eagerly: it would be compiled anew for evaluation at each change."""
    replica.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=test[0].device)
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with eager, torch.autocast(test[0].device.type, torch.bfloat16):
        for x, y in zip(*(t.split(1000) for t in test), strict=True):
            totals += _judge(replica(x).float(), y)
    replica.train()
    names = ("accuracy", "top5_accuracy", "test_loss", "test_loss_smoothed")
    return dict(zip(names, (totals / len(test[0])).tolist(), strict=True))


def _judge(outputs: Tensor, y: Tensor) -> Tensor:
    hits, near = outputs.argmax(1) == y, outputs.topk(5).indices == y[:, None]
    losses = [F.cross_entropy(outputs, y, reduction="sum", label_smoothing=s) for s in (0.0, SMOOTHING)]
    return torch.stack([hits.sum(), near.sum(), *losses])


def tell(replica: thinwire.Replica, history: History, test: Images, settings: dict[str, Any], steps: int) -> None:
    """Finish the model, print the main figures and write all of them."""
    options = history.options
    with replica.merged():
        before = evaluate(replica, test, compiled=options.compile)
    small = replica.finish()
    told, traffic, baseline = replica.describe(), replica.mean_traffic(), replica.baseline()
    summary = traffic.summary()
    sent = summary["slow_bytes"] - summary["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)
    result = {
        "method": options.method,
        "set": options.set,
        **settings,
        "batch": options.batch,
        "seed": options.seed,
        "epochs": options.epochs,
        "steps": steps,
        "seconds": history.seconds,
        "seconds_evaluating": history.seconds_evaluating,
        "seconds_watching": history.seconds_watching,
        "peak_memory": history.peak_memory or None,
        **evaluate(replica, test),
        "accuracy_before_truncation": before["accuracy"],
        "before_truncation": before,
        "slow_bytes": sent,
        "workers": replica.topology.world_size,
        "validated": options.validate,
        "compiled": options.compile,
        **{f"traffic_vs_{name}": sent / max(1, value) for name, value in baseline.items()},
        "compression": told["parameters_full"] / sum(p.numel() for p in small.parameters()),
        "traffic": summary,
        "time": traffic.split,
        "ranks": history.ranks,
        "trainable": history.trainable,
        "stability": history.stability,
        "described": told,
        "curve": history.curve,
    }
    if replica.topology.rank == 0:
        _show(result, options.json)


def _show(result: dict[str, Any], file: str | None) -> None:
    shown = ("method", "set", "seed", "accuracy", "accuracy_before_truncation", "traffic_vs_allreduce_fp32")
    print({k: result[k] for k in (*shown, "traffic_vs_ideal_fp32", "compression", "seconds")}, flush=True)
    if file:
        Path(file).write_text(json.dumps(result, indent=1))
        if result["stability"]:
            title = f"CIFAR-10, {result['method']}, seed {result['seed']}"
            draw_looks(result["stability"], title, Path(file).with_suffix(".png"))


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


# The command line.


def parser(description: str | None, *, epochs: int) -> argparse.ArgumentParser:
    """The options that every model has."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=Path, required=True)
    made.add_argument("--method", choices=sorted(METHODS), default="ab")
    made.add_argument("--epochs", type=int, default=epochs)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--batch", type=int, default=1024, help="images a step, over all workers")
    made.add_argument("--group-size")
    made.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE")
    made.add_argument("--compile", action="store_true", help="by torch.compile")
    made.add_argument("--stability", type=int, metavar="N", help="look at the bases every N steps")
    made.add_argument("--stability-back", type=int, default=1, metavar="K", help="and compare with K looks before")
    made.add_argument("--evaluate-every", type=int, default=5, metavar="EPOCHS")
    made.add_argument("--validate", action="store_true", help="judge on a tenth of the training images, kept out")
    made.add_argument("--samples", type=int, help="only so many images, to try it out")
    made.add_argument("--json")
    return made
