"""Workers of a user's script, of which one ends before the others; what each prints, and how it ends.

Forked from one process, which keeps the store as torchrun does, and each ends as any script does.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # once, and not in every worker
import torch.distributed as dist

import small
import thinwire
from thinwire.comm import missing

STEPS = 200
METHODS = {
    "allreduce": thinwire.AllReduce(),
    "coded": thinwire.AllReduce(wire="int8"),
    "localsgd": thinwire.LocalSGD(every=50),
    "each": thinwire.LocalSGD(every=1),
}


def train(rank: int, odd: int, how: str, method: str) -> None:
    """A script in which one rank is odd: it stops after three steps."""
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, METHODS[method])
    for number in range(3 if rank == odd or how.startswith("together") else STEPS):
        small.step(replica, optimizer, rank, number)
        if rank != odd and method == "localsgd":
            time.sleep(0.01)  # else the next average may be over before anybody has stopped
    if rank == odd:
        leave(replica, how)
    if how != "together, lingers":
        replica.finish()


def leave(replica: thinwire.Replica, how: str) -> None:
    """What the odd one does; it calls `finish()` if this returns."""
    if how == "in the middle of a step":
        replica(small.batch(0, 3)[0])
    elif how in ("raises", "together, raises"):
        raise ValueError("sample 17 is damaged\nby a cosmic ray")
    elif how == "raises after it has left":
        try:
            raise ValueError("sample 17 is damaged")
        finally:
            dist.destroy_process_group()
    elif how in ("ends", "together, ends"):
        sys.exit()
    elif how == "together, lingers":
        time.sleep(6)  # three times as long as it stays silent
    elif how == "together, killed":
        os.kill(os.getpid(), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def place(rank: int, workers: int, port: int, keeper: str) -> None:
    """The environment that a launcher gives."""
    found = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in found.items()})
    if keeper == "launcher":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def fork(folder: Path, workers: int, keeper: str) -> int | None:
    """Start workers; returns the rank in each of them, None in the parent when all have ended."""
    port, children = free_port(), {}
    for rank in range(workers):
        child = os.fork()
        if child == 0:
            said = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(said, stream)
            place(rank, workers, port, keeper)
            return rank
        children[child] = rank
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if keeper == "launcher" else None
    codes = {}
    for _ in range(workers):
        child, status = os.wait()
        codes[children[child]] = os.waitstatus_to_exitcode(status)
    (folder / "codes").write_text(json.dumps([codes[rank] for rank in range(workers)]))
    del store
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, workers, odd, how, method, keeper, waits = sys.argv[1:]
    for name, seconds in json.loads(waits).items():
        setattr(missing, name, seconds)
    if (rank := fork(Path(folder), int(workers), keeper)) is not None:
        train(rank, int(odd), how, method)
