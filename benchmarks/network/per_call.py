"""What the kernel counts beside the ledger, call by call: gloo's own headers and notices, and the store's.

sudo python benchmarks/network/per_call.py
"""

import os
import subprocess
import sys

import torch
from torch import nn

import thinwire
from thinwire.comm.backends import INTERFACE
from thinwire.comm.ledger import HEADERS, Interface
from thinwire.netbench.hosts import Hosts

CALLS = 200
PORT = 29517


def main() -> None:
    """Two hosts with one worker each; the first prints."""
    with Hosts(count=2, name="thinwirecalls") as lab:
        first = lab.hosts[0].address
        workers = []
        for number, host in enumerate(lab.hosts):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            words += [f"--master-addr={first}", f"--master-port={PORT}", "--nproc-per-node=1", __file__, "worker"]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": host.interface, INTERFACE: host.interface}
            quiet = subprocess.DEVNULL
            workers.append(
                subprocess.Popen(host.command(words), env=environment | {"OMP_NUM_THREADS": "1"}, stderr=quiet)
            )
        for worker in workers:
            worker.wait()


def work() -> None:
    """Each kind of call, many times."""
    model = nn.Linear(8, 8)
    replica = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), thinwire.AllReduce())
    wire, interface = replica.wire, Interface(os.environ[INTERFACE])
    large, small = torch.zeros(250_000), torch.zeros(3, dtype=torch.float64)
    calls = {
        "all-reduce, 1 MB": lambda: wire.all_reduce_sum(large, "x"),
        "all-reduce, 24 B": lambda: wire.all_reduce_sum(small, "x"),
        "broadcast, 1 MB": lambda: wire.broadcast([large], "x"),
        "broadcast, 24 B": lambda: wire.broadcast([small], "x"),
        "all-gather, 16 B": lambda: wire.all_gather_scalars([0.0, 1.0], "x"),
        "objects, a word": lambda: wire.all_gather_object("word"),
        "barrier": lambda: wire.barrier("x"),
    }
    for name, call in calls.items():
        call()
        wire.barrier("start")
        counted, before = replica.traffic.slow_bytes, interface.read()
        for _ in range(CALLS):
            call()
        wire.barrier("end")
        after = interface.read()
        mine = (replica.traffic.slow_bytes - counted) / CALLS
        packets = (after.packets - before.packets) / CALLS
        left = (after.bytes - before.bytes) / CALLS - HEADERS * packets - mine
        both = wire.all_gather_scalars([mine, left, packets], "x")
        if replica.topology.rank == 0:
            means = [sum(column) / 2 for column in zip(*both, strict=True)]
            print(f"| {name} | {means[0]:,.0f} | {means[1]:.0f} | {means[2]:.1f} |", flush=True)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["worker"] else main()
