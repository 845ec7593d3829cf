"""Two workers of a user's script that never leaves: what is still there when the interpreter itself ends.

Forked from one process, and each ends as any script does. Each prints the threads that process groups still have.
"""

import atexit
import os
import socket
import sys
from pathlib import Path

import torch
import torch._dynamo  # once, and not in every worker
import torch.distributed as dist

import thinwire


def threads() -> list[str]:
    """Names of those that process groups have started."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return sorted(name for name in names if "gloo" in name)


def train(rank: int, port: int, how: str) -> None:
    """What a script does, with everything it made still in its hands at the end."""
    global model, optimizer, replica
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if how == "own group":
        dist.init_process_group("gloo")
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    for _ in range(3):
        loss = replica(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert threads(), "process groups have no threads that can be known by their names"
    if how == "finish":
        replica.finish()
    if how == "own group":
        dist.destroy_process_group()


def say(line: str) -> None:
    """In one piece: `print` writes a line and its end, and another process may come between."""
    os.write(1, f"{line}\n".encode())


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def fork(how: str) -> int | None:
    """Two workers; returns the rank in each of them, None in the parent when both have ended."""
    port, children = free_port(), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            # Registered first, so called last.
            atexit.register(lambda: say(f"{how}: {threads()} {dist.is_initialized()}"))
            train(rank, port, how)
            return rank
        children.append(child)
    for child in children:
        say(f"{how} ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for how in sys.argv[1:]:
        if fork(how) is not None:
            break
