"""What SLURM tells the tasks of a step: their places, their nodes, and where the first of them can be reached.

Only variables that srun sets for a step are believed. A shell inside an allocation, or a batch script, has the job's.
"""

import re
from collections.abc import Iterator, Mapping

from thinwire.base.errors import ConfigError

_PORTS = range(20_000, 32_000)  # below those that Linux gives to connections
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")


def tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this step; 1 outside of one."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", 1))


def tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of this step on this node: SLURM writes 4(x2),3 for nodes with 4, 4 and 3 of them."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    each = [int(count) for count, times in _REPEATED.findall(text) for _ in range(int(times or 1))]
    return each[min(int(environment.get("SLURM_NODEID", 0)), len(each) - 1)]


def hosts(nodelist: str) -> list[str]:
    """The names in a node list such as node[01-03,07],login1."""
    return [host for item in _ITEM.findall(nodelist) for host in _expanded(item.strip())]


def _expanded(item: str) -> Iterator[str]:
    before, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise ConfigError(f"{item!r} is not a valid node list of SLURM; export MASTER_ADDR in the job script")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expanded(after):
                yield f"{before}{number:0{len(first)}}{tail}"


def address(environment: Mapping[str, str]) -> str | None:
    """Where other tasks reach the first one, which is on the step's first node; None where SLURM does not say.

    SLURM_LAUNCH_NODE_IPADDR comes last: it is where srun runs, which may be a login node.
    """
    nodes = hosts(environment.get("SLURM_STEP_NODELIST", ""))
    if len(nodes) == 1:
        return "127.0.0.1"
    return nodes[0] if nodes else environment.get("SLURM_LAUNCH_NODE_IPADDR")


def port(environment: Mapping[str, str]) -> int:
    """A port that other jobs and steps on the same nodes do not use, most likely."""
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if not (job.isdecimal() and step.isdecimal()):
        return _PORTS[0]
    return _PORTS[(int(job) + 97 * int(step)) % len(_PORTS)]
