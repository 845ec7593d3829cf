"""gloo or nccl between machines: seconds of collectives at several rates, and bytes by the ledger and by the kernel.

Two hosts of `thinwire.netbench` with two workers each, as root. On a machine with one GPU nccl from 2.30 on lets the
workers share it (NCCL_MULTI_RANK_GPU_ENABLE=1, and the library preloaded where torch has an older one); NCCL_HOSTID
makes them two machines for nccl, which then takes sockets between them. Without GPUs there is gloo alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from processes import wait_for
from torch import Tensor

from thinwire.comm.backends import INTERFACE, Backends
from thinwire.comm.collectives import ProcessGroupWire
from thinwire.comm.ledger import HEADERS, Interface, Ledger
from thinwire.comm.topology import Topology
from thinwire.netbench.hosts import Hosts, parse_rate

PORT, REPEATS, WAIT_S = 29531, 3, 150
NODES = ((0, 1), (2, 3))
SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}


def main() -> None:
    """All rates, one after the other; prints a table, and writes each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="100Mbit,1Gbit,10Gbit")
    parser.add_argument("--out", type=Path, default=Path("backends.jsonl"))
    parser.add_argument("--worker", metavar="RANK", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work(given.worker, given.rate, given.out)
        return
    with Hosts(len(NODES), name="gpu-backends") as lab:
        for rate in given.rates.split(","):
            lab.shape(parse_rate(rate))
            launched(lab, rate, given.out, {})
            if parse_rate(rate) > 5e9 and torch.cuda.is_available():
                launched(lab, rate, given.out, SOCKETS)
    for row in map(json.loads, given.out.read_text().splitlines()):
        print(*(f"{value:>9.3g}" if isinstance(value, float) else f"{value!s:<15}" for value in row.values()))


def launched(lab: Hosts, rate: str, out: Path, more: dict[str, str]) -> None:
    """One gang of workers."""
    workers = []
    for rank in range(sum(map(len, NODES))):
        host = next(i for i, node in enumerate(NODES) if rank in node)
        place = {"GROUP_RANK": host, "NCCL_HOSTID": f"host{host}", "MASTER_ADDR": lab.hosts[0].address}
        links = dict.fromkeys((INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), lab.hosts[host].interface)
        words = [sys.executable, __file__, "--worker", str(rank), "--rate", rate, "--out", str(out)]
        environment = os.environ | {name: str(value) for name, value in place.items()} | links | more
        workers.append(subprocess.Popen(lab.hosts[host].command(words), env=environment, start_new_session=True))
    wait_for(workers, WAIT_S, rate)


def work(rank: int, rate: str, out: Path) -> None:
    """What one worker does at one rate."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_num_threads(1)
    where = f"tcp://{os.environ['MASTER_ADDR']}:{PORT}"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=where, rank=rank, world_size=4)
    interface = Interface(os.environ[INTERFACE])
    settings = "16 sockets" if os.environ.get("NCCL_NSOCKS_PERTHREAD") else ""
    for backend in ("gloo", "nccl") if on_gpu else ("gloo",):
        if settings and backend == "gloo":
            continue
        backends = Backends(between=backend if on_gpu else None, device=device)
        layout = Topology(rank, NODES, NODES, backends.algorithm)
        wire = ProcessGroupWire(layout, Ledger(), backends=backends)
        for size in (1 << 18, int(parse_rate(rate) / 8 * 0.3) >> 4 << 4):
            for name, call in calls(wire, size, device):
                row = measured(wire, interface, call, device)
                if rank == 0:
                    about = {"rate": rate, "backend": f"{backend} {settings}".strip(), "call": name, "MB": size / 1e6}
                    with out.open("a") as file:
                        file.write(json.dumps(about | row) + "\n")
    dist.barrier()
    os._exit(0)


def calls(wire: ProcessGroupWire, size: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What methods do between nodes."""
    whole, rows = torch.ones(size // 4, device=device), torch.ones(2, size // 8, device=device)
    world = wire.topology.world

    def all_reduce() -> None:  # as DDP does it
        dist.all_reduce(whole, group=wire.process_group(world))
        wire.count("x", wire.topology.all_reduce(world, size))

    def pending(begin: Callable[[], Any]) -> Tensor:
        return begin().wait()

    yield "all-reduce", all_reduce
    yield "average", lambda: wire.sum_over_groups([whole], "x")
    yield "all-to-all", lambda: pending(lambda: wire.all_to_all(rows, "x"))
    yield "all-gather", lambda: pending(lambda: wire.all_gather(rows[0], "x"))
    yield "broadcast", lambda: wire.broadcast([whole], "x")


def measured(wire: ProcessGroupWire, interface: Interface, call: Callable[[], Any], device: torch.device) -> Any:
    """Seconds of the slowest worker, what the ledger says the node sent, and the kernel's payload over that."""
    seconds = []
    for repeat in range(REPEATS + 1):
        if repeat == 1:
            wire.barrier("before")
            time.sleep(0.02)
            ledger, kernel = wire.ledger.slow_bytes, interface.read()
        wire.barrier("begin")
        begun = time.monotonic()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(float(wire.all_reduce_max(torch.tensor(time.monotonic() - begun), "timing")))
    wire.barrier("after")
    time.sleep(0.02)
    now = interface.read()
    sent = (wire.ledger.slow_bytes - ledger) / REPEATS
    counted = (now.bytes - kernel.bytes - HEADERS * (now.packets - kernel.packets)) / REPEATS
    return {"seconds": statistics.median(seconds[1:]), "sent": sent, "kernel": counted / max(1, sent)}


if __name__ == "__main__":
    main()
