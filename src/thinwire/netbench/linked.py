"""The nodes of a job as hosts of their own on this machine, with a link of a given rate each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.base.errors import ConfigError
from thinwire.launch.launcher import HostSpec
from thinwire.netbench.hosts import Hosts, check, parse_rate


def nodes_for(workers: int, group_size: str | None) -> int:
    """A group is a node, and without a size every worker is."""
    size = int(group_size) if group_size is not None and group_size.isdecimal() else 1
    if group_size == "world" or size < 1 or workers % size or workers // size < 2:
        raise ConfigError(
            f"`--link` is between nodes, and {workers} workers with `--group-size`={group_size} are not two or more "
            "nodes of one size; use `--workers 4 --group-size 2`, or leave out `--group-size` for one worker a node"
        )
    return workers // size


@contextmanager
def linked(rate: str, nodes: int, workers: int) -> Iterator[tuple[HostSpec, ...]]:
    """Create the hosts, and remove them at the end."""
    name = f"thinwire-{os.getpid()}"
    check(nodes, name, workers // nodes)
    with Hosts(count=nodes, rate=parse_rate(rate), name=name) as lab:
        yield lab.specs()
