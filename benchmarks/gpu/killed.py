"""A group that is killed in the middle and comes back: two machines, nccl inside each of them, gloo in between.

Machines are hosts of `thinwire.netbench` with a shaped link, as root; a store runs on a third. Each machine is a group
of two workers, which a launcher starts again when they were killed. How workers share one GPU is in backends.py.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from processes import wait_for
from production import images, vgg

import thinwire
from thinwire import Faults
from thinwire.comm.backends import INTERFACE
from thinwire.elastic import store
from thinwire.netbench.hosts import Host, Hosts, parse_rate

PORT, NODES, WORKERS = 29551, 2, 2


def main() -> None:
    """A gang, a kill in the middle, and a table of what each group's first worker saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100Mbit")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=24)
    parser.add_argument("--kill-at", type=int, default=500, help="the step at which group 1 is killed")
    parser.add_argument("--images", type=Path, help="as for production.py")
    parser.add_argument("--small", action="store_true", help="a small model, where there is no GPU")
    parser.add_argument("--wait", type=float, default=200.0, help="seconds for all of it")
    parser.add_argument("--out", type=Path, default=Path("killed.jsonl"))
    parser.add_argument("--worker", metavar="GROUP", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work(given)
        return
    marker = given.out.with_suffix(".reached")
    marker.unlink(missing_ok=True)
    with Hosts(NODES + 1, name="gpu-killed") as lab:
        lab.shape(parse_rate(given.rate))
        kept = subprocess.Popen(
            lab.hosts[NODES].command([sys.executable, "-m", "thinwire", "store", "--port", str(PORT)]),
            stdout=subprocess.DEVNULL,
        )
        groups = [launched(lab, group, given) for group in range(NODES)]
        end = time.monotonic() + given.wait
        while not marker.exists() and time.monotonic() < end:
            time.sleep(0.05)
        for worker in groups[1]:
            os.killpg(worker.pid, signal.SIGKILL)
        print("group 1 is killed")
        time.sleep(3.0)
        groups[1] = launched(lab, 1, given)
        wait_for([worker for group in groups for worker in group], end - time.monotonic(), "all of it")
        kept.kill()


def launched(lab: Hosts, group: int, given: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """The workers of one machine."""
    host: Host = lab.hosts[group]
    place = {"WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": WORKERS, "OMP_NUM_THREADS": 1, INTERFACE: host.interface}
    place |= {store.STORE: f"{lab.hosts[NODES].address}:{PORT}", store.GROUP: group, store.GROUPS: NODES}
    workers = []
    for rank in range(WORKERS):
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{group}"}
        words = [sys.executable, *sys.argv, "--worker", str(group)]
        workers.append(subprocess.Popen(host.command(words), env=environment, start_new_session=True))
    return workers


def work(given: argparse.Namespace) -> None:
    """Train; the loss and the time of each step go to the file."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    model = vgg(given.small).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=device.type == "cuda")
    config = thinwire.DiLoCo(warmup=0, every=given.every, wire="int2")
    replica = thinwire.attach(model, optimizer, config, faults=Faults(timeout=30.0))
    first, began, losses = int(os.environ["RANK"]) == 0, time.time(), []
    batches = images(10 * given.worker + int(os.environ["RANK"]), given, device)
    for step in replica.steps(given.steps):
        x, y = next(batches)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(replica(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((step, round(time.time() - began, 3), loss.detach()))
        if first and given.worker == 1 and step >= given.kill_at:
            given.out.with_suffix(".reached").touch()
    if first:
        row = {"group": given.worker, "rate": given.rate, "seconds": time.time() - began}
        row |= {"steps here": len(losses), "events": replica.events, "MB": replica.traffic.slow_bytes / 1e6}
        row |= {"losses": [(step, at, round(float(loss), 4)) for step, at, loss in losses[:: max(1, given.every // 4)]]}
        print({name: value for name, value in row.items() if name != "losses"}, flush=True)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    replica.finish()
    os._exit(0)


if __name__ == "__main__":
    main()
