"""Virtual hosts on this machine, removed when they are no longer used.

Before anything is created, a record with the owning process is written to /run/thinwire. A killed process leaves its
record behind, and the next start removes what it lists. Creating and removing is done under one lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from thinwire.base import units
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.base.files import parse_json
from thinwire.base.schema import COUNT, FLAG, TEXT, Record, wrong
from thinwire.comm.backends import INTERFACE
from thinwire.comm.ledger import LINK
from thinwire.launch.launcher import HostSpec, sigterm_exits
from thinwire.netbench import namespaces
from thinwire.netbench.namespaces import CommandError, Counters, Host, Probe, parse_rate

__all__ = ["Counters", "Host", "Hosts", "Probe", "check", "clean", "parse_rate", "why_not"]

_RECORDS = Path("/run/thinwire")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_TRIAL = "netbench.trial"  # not a valid user-given name
_MOST_HOSTS = 64
_MOST_WORKERS_PER_CORE = 8
_TIMEOUT_S = 5
_RECORD = Record(name=TEXT, pid=COUNT, start=(None, COUNT), namespaces=[TEXT], keep=FLAG)


class Hosts:
    """`count` hosts on one switch, each link limited to `rate` bit/s in both directions; None is unlimited.

    With `keep` they remain after exit, without their processes, until the next start under the same name.
    """

    def __init__(self, count: int = 2, rate: float | None = None, name: str = "thinwire", keep: bool = False) -> None:
        self.hosts = [Host(f"{name}-h{index}", f"10.77.0.{index + 1}") for index in range(count)]
        self._rate = None if rate is None else namespaces.allowed(rate, units.rate(rate))
        self._name = name
        self._keep = keep
        self._switch = f"{name}-switch"
        self._built = False
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        check(len(self.hosts), self._name)
        record = _Record.mine(self._name, [self._switch, *(host.namespace for host in self.hosts)], keep=False)
        with ExitStack() as stack:
            stack.enter_context(sigterm_exits())
            with _locked():
                _sweep(_records())
                _free_name(record)
                stack.callback(self._leave, record)
                record.write()
                namespaces.build(self.hosts, self._switch)
                if self._rate is not None:
                    self.shape(self._rate)
            self._built = True
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def shape(self, rate: float | None) -> None:
        """Change the rate of all links, in bit/s; None removes the limit."""
        self._rate = None if rate is None else namespaces.allowed(rate, units.rate(rate))
        namespaces.shape(self.hosts, self._switch, self._rate)

    def specs(self) -> tuple[HostSpec, ...]:
        """The hosts for the launcher, each with its interface counted, and its rate on record."""
        rate = {} if self._rate is None else {LINK: units.rate(self._rate)}
        return tuple(
            HostSpec(
                prefix=tuple(host.command([])),
                address=host.address,
                environment={"GLOO_SOCKET_IFNAME": host.interface, INTERFACE: host.interface, **rate},
            )
            for host in self.hosts
        )

    def counters(self) -> list[Counters]:
        return [host.counters() for host in self.hosts]

    def probe(self) -> Probe:
        """Measure the link from host 0 to host 1; takes about two seconds."""
        found = namespaces.measure(self.hosts[0], self.hosts[1])
        if self._rate is not None:  # drop what the probe left in the queues, so that it is not counted
            namespaces.shape(self.hosts, self._switch, None)
            namespaces.shape(self.hosts, self._switch, self._rate)
        return found

    def _leave(self, record: _Record) -> None:
        with _locked():
            if self._keep and self._built:
                _end_processes(record.namespaces)
                replace(record, start=None, keep=True).write()
            else:
                _remove(record)


def check(count: int, name: str, workers: int = 1) -> None:
    """Raise if `count` hosts called `name` with `workers` workers each cannot work here."""
    _check_size(count, workers)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid name for hosts; use up to 32 letters, digits and -, not - first")
    _check_machine()


def why_not() -> str | None:
    """Why hosts cannot be created on this machine; None if they can."""
    try:
        _check_machine()
    except ThinwireError as error:
        return str(error)
    return None


def clean(name: str | None = None, include_kept: bool = False) -> list[str]:
    """Remove what dead owners left, under every name or one; returns the removed namespaces."""
    _check_root()
    with _locked():
        return _sweep([record for record in _records() if name in (None, record.name)], include_kept)


@dataclass(frozen=True)
class _Record:
    """Which process created which namespaces; its start time guards against reused pids."""

    name: str
    pid: int
    start: int | None
    namespaces: list[str]
    keep: bool

    @classmethod
    def mine(cls, name: str, namespaces: list[str], keep: bool) -> _Record:
        return cls(name, os.getpid(), _start_time(os.getpid()), namespaces, keep)

    @property
    def path(self) -> Path:
        return _RECORDS / f"{self.name}.json"

    @property
    def alive(self) -> bool:
        return self.start is not None and _start_time(self.pid) == self.start

    def write(self) -> None:
        draft = _RECORDS / "draft"  # one is enough under the lock
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(self.path)


def _records() -> list[_Record]:
    records = []
    for path in sorted(_RECORDS.glob("*.json")):
        try:
            found = parse_json(path.read_bytes())
            if what := wrong(found, _RECORD):
                raise ValueError(what)
            if found["name"] != path.stem or any("/" in namespace for namespace in found["namespaces"]):
                raise ValueError("its names lead elsewhere")
            records.append(_Record(**found))
        except ValueError as error:
            raise ThinwireError(f"{path} is not a valid netbench record ({error}); remove it") from error
    return records


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it has ended, zombies included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    try:
        _RECORDS.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ThinwireError(f"netbench keeps its records in {_RECORDS}, which cannot be created: {error}") from error
    with namespaces.locked(_RECORDS / "lock"):
        yield


def _sweep(records: Iterable[_Record], include_kept: bool = False) -> list[str]:
    """Remove records without a living owner, and their namespaces."""
    old = [record for record in records if not record.alive and (include_kept or not record.keep)]
    return [namespace for record in old for namespace in _remove(record)]


def _free_name(record: _Record) -> None:
    """Remove kept hosts of this name; raise if they are in use."""
    for other in _records():
        if other.name == record.name:
            if other.alive:
                raise ConfigError(f"hosts `{other.name}` are in use by process {other.pid}; give another `--name`")
            _remove(other)
    if foreign := _present(record.namespaces):
        removal = "; ".join(f"ip netns delete {namespace}" for namespace in foreign)
        raise ConfigError(
            f"network namespaces {', '.join(foreign)} exist and were not created by netbench; "
            f"remove them with `{removal}`, or give another `--name`"
        )


def _remove(record: _Record) -> list[str]:
    """Kill processes in the record's namespaces and delete them; the record goes last, so that this can be retried."""
    found = _present(record.namespaces)
    _end_processes(found)
    failed = None
    for namespace in found:
        try:
            namespaces.run("ip", "netns", "delete", namespace)
        except CommandError as error:
            failed = error
    if failed and _present(found):
        raise failed
    record.path.unlink(missing_ok=True)
    return found


def _present(names: Sequence[str]) -> list[str]:
    return [name for name in names if (namespaces.NAMESPACES / name).exists()]


def _end_processes(names: Sequence[str]) -> None:
    """Kill until no process is inside: a killed one may just have started another."""
    deadline = time.monotonic() + _TIMEOUT_S
    while pids := _pids_inside(names):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ThinwireError(f"processes {pids} in {', '.join(names)} survive SIGKILL")
        time.sleep(0.005)


def _pids_inside(names: Sequence[str]) -> list[int]:
    """The processes inside, in one pass over /proc, where `ip netns pids` takes one per namespace.

    The namespace of this process itself is left out, whatever its name.
    """
    places = [os.stat(namespaces.NAMESPACES / name) for name in _present(names)]
    places = [place for place in places if not os.path.samestat(place, os.stat("/proc/self/ns/net"))]
    inside = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            place = os.stat(f"/proc/{pid}/ns/net")
            if any(os.path.samestat(place, other) for other in places):
                inside.append(pid)
    return inside


def _check_size(count: int, workers: int) -> None:
    if count < 2:
        raise ConfigError(f"{count} hosts have no link between them; use 2 to {_MOST_HOSTS}")
    if workers < 1:
        raise ConfigError(f"{workers} workers per host is too few; use 1 or more")
    cores = len(os.sched_getaffinity(0))
    hosts = min(_MOST_HOSTS, _MOST_WORKERS_PER_CORE * cores // workers)
    if count > hosts:
        most = f"{hosts} hosts" if hosts > 1 else f"{_MOST_WORKERS_PER_CORE * cores // 2} workers on each of 2 hosts"
        given = (
            f"{units.count(count, 'host')} with {units.count(workers, 'worker')} each on {units.count(cores, 'core')}"
        )
        raise ConfigError(f"{given} would measure the scheduler rather than the network; use at most {most}")


def _check_root() -> None:
    if os.geteuid():
        raise ConfigError(
            "creating hosts on this machine, which are network namespaces, needs root: run it with sudo, "
            "or in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        )


def _check_machine() -> None:
    """Root, the tools, and a kernel that can create a namespace with a shaped link."""
    _check_root()
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(
                f"hosts on this machine need `{tool}`, which is not on the path; install iproute2, "
                "e.g. apt install iproute2"
            )
    trial = _Record.mine(_TRIAL, [_TRIAL], keep=False)
    with _locked():
        _remove(trial)  # left by a process that was killed here
        trial.write()
        try:
            _try(trial.namespaces[0])
        finally:
            _remove(trial)


def _try(namespace: str) -> None:
    try:
        namespaces.run("ip", "netns", "add", namespace)
    except CommandError as error:
        raise ConfigError(
            f"this machine refuses network namespaces ({error.output}); run this on the machine itself, "
            "or in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN"
        ) from error
    try:
        namespaces.hold(namespace, ["lo"], 1e6)
    except CommandError as error:
        raise ConfigError(
            f"this kernel cannot shape links ({error.output}); load tbf with `modprobe sch_tbf`"
        ) from error


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
