"""One group of a run that goes on when groups die: what a user would start on each node. Trains digits.

    THINWIRE_STORE=HOST:29400 THINWIRE_GROUPS=4 THINWIRE_GROUP=0 python benchmarks/faults/group.py --out OUT

OUT/GROUP-PID.jsonl has a line per step: its number, the time, whether groups averaged something in it, the processor
time so far, how often groups have changed, and the phase. A step that was skipped has the number of the one before.
A group that comes to the end adds OUT/GROUP-PID.json with its accuracy, a digest of its model, and the events. With
`--save-every` it saves to OUT/saves, and resumes from there when all are started anew. SIGUSR1 prints all stacks.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from thinwire.launch.jobs import Job
from thinwire.train.batcher import Batcher
from thinwire.train.schedule import scheduled


def main() -> None:
    given = arguments()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    group, groups, rank, workers = (
        int(os.environ[name]) for name in ("THINWIRE_GROUP", "THINWIRE_GROUPS", "RANK", "WORLD_SIZE")
    )
    job = Job(recipe="digits", method=given.method, out=given.out, steps=given.steps, settings=tuple(given.set))
    recipe = job.trained
    source = recipe.source(None)
    model = recipe.model(source)
    optimizer = recipe.optimizer(model.parameters())
    place = {"rank": group * workers + rank, "world_size": groups * workers}
    batcher = Batcher(recipe, source, torch.device("cpu"), seed=given.seed, **place)
    if given.plain:
        init_plainly(group, groups)
    scheduler = scheduled(optimizer, recipe.rate, steps=given.steps, epochs=1.0)
    replica = thinwire.attach(model, optimizer, job.config, faults=None if given.plain else faults(given))
    log = (given.out / f"{group}-{os.getpid()}.jsonl").open("w", buffering=1)
    stalls = random.Random(given.seed)
    folder = given.out / "saves" if given.save_every else None
    for step in replica.steps(given.steps, folder=folder, save_every=given.save_every or None, scheduler=scheduler):
        sent = averaged_bytes(replica)
        x, y = batcher.batch(step)
        loss = recipe.task.loss(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averages = replica.step > step and averaged_bytes(replica) > sent
        changes = sum(event["event"] == "groups" for event in replica.events)
        row = [replica.step, time.time(), averages, time.process_time(), changes, replica.phase]
        log.write(json.dumps(row) + "\n")
        time.sleep(given.slow)
        if group == given.late_group and stalls.random() < given.stalls:
            time.sleep(given.late)
    events, waits = replica.events, replica.describe()["waits"]
    finished = replica.finish()
    found = {"group": group, "step": replica.step, "accuracy": accuracy(finished, batcher), "digest": digest(finished)}
    path = given.out / f"{group}-{os.getpid()}.json"
    path.write_text(json.dumps(found | {"events": events, "waits": waits}), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", default="localsgd")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--late-group", type=int, help="a group that is slower than the others")
    parser.add_argument("--late", type=float, default=0.0, help="seconds that its steps take longer")
    parser.add_argument("--stalls", type=float, default=1.0, help="the share of its steps that do")
    parser.add_argument("--skip-after", type=float, help="seconds that others wait before it leaves out steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=12.0)
    parser.add_argument("--defaults", action="store_true", help="Faults() as it is")
    parser.add_argument("--save-every", type=int, default=0, help="steps between two saves; 0 saves nothing")
    parser.add_argument("--plain", action="store_true", help="without `faults=`: what it costs is the difference")
    parser.add_argument("--min-groups", type=int, default=1)
    return parser.parse_args()


def faults(given: argparse.Namespace) -> thinwire.Faults:
    if given.defaults:
        return thinwire.Faults()
    return thinwire.Faults(min_groups=given.min_groups, timeout=given.timeout, skip_after=given.skip_after)


def averaged_bytes(replica: thinwire.Replica) -> int:
    """Return the bytes of gradients and parameters that this group has sent to others; votes are not among them."""
    return sum(map(replica.traffic.slow_bytes_for, ("gradients", "merge")))


def init_plainly(group: int, groups: int) -> None:
    """As torchrun would, by the same store."""
    host, _, port = os.environ["THINWIRE_STORE"].rpartition(":")
    dist.init_process_group("gloo", store=dist.TCPStore(host, int(port)), rank=group, world_size=groups)


@torch.no_grad()
def accuracy(model: nn.Module, batcher: Batcher) -> float:
    model.eval()
    images, labels = batcher.source.heldout(np.arange(batcher.source.heldout_size))
    return float((model(images).argmax(1) == labels).float().mean())


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers."""
    found = hashlib.blake2b(digest_size=8)
    values: dict[str, Any] = model.state_dict()
    for name in sorted(values):
        if isinstance(values[name], Tensor):
            found.update(values[name].contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
