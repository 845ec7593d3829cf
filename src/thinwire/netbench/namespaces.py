"""Hosts as network namespaces, the links between them, and measuring a link.

Every host is a namespace with one interface, `wire0`, whose other end is a port of a bridge; the bridge has
its own namespace, so the machine's interfaces are never touched. Everything that adds packets no job sent (IPv6,
ARP, spanning tree, flooding of unknown addresses) is off, and packets are never larger than the MTU: the kernel
counts what a cable would have carried.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.base.units import bits_per_second

Result = TypeVar("Result")

NAMESPACES = Path("/var/run/netns")  # as `ip netns` has it
_HARDWARE = "02:00:0a:4d:00:{:02x}"
_SLOWEST, _FASTEST = 1e6, 10e9
_TIMEOUT_S = 30
_HELD: ContextVar[tuple[int, ...]] = ContextVar("held", default=())

_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
_ATTEMPTS, _PATIENCE = 500, 20  # looks at the counters, and how many before the next broadcast
_OFFLOADS = {"TSO": (0x1E, 0x1F), "GSO": (0x23, 0x24), "GRO": (0x2B, 0x2C)}  # ETHTOOL_G… and ETHTOOL_S…


class CommandError(ThinwireError, RuntimeError):
    """An iproute2 command failed; the message has the command, `output` what it printed."""

    def __init__(self, command: str, output: str) -> None:
        super().__init__(f"`{command}` failed: {output}")
        self.output = output


@dataclass(frozen=True)
class Counters:
    """The kernel's counters of a host's interface, including Ethernet headers."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


@dataclass(frozen=True)
class Probe:
    """A measured link: payload rate of one TCP stream, and one-way latency of a small message."""

    bits_per_second: float
    latency_s: float


@dataclass(frozen=True)
class Host:
    """A namespace that simulates one machine."""

    namespace: str
    address: str
    interface: str = "wire0"

    def command(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def counters(self) -> Counters:
        lines = inside(self.namespace, Path("/proc/thread-self/net/dev").read_text).splitlines()
        line = next(line for line in lines if line.strip().startswith(f"{self.interface}:"))
        counts = [int(word) for word in line.split(":")[1].split()]
        return Counters(counts[8], counts[9], counts[0], counts[1])


def parse_rate(text: str) -> float | None:
    """A link's rate in bit/s; None for `unshaped`."""
    return None if text.strip().lower() == "unshaped" else allowed(bits_per_second(text), text)


def allowed(rate: float, given: str) -> float:
    """The rate, if links can be shaped to it."""
    if not _SLOWEST <= rate <= _FASTEST:
        span = "can be shaped from 1 Mbit to 10 Gbit; `unshaped` sets no limit"
        raise ConfigError(f"{given} is out of range: a link {span}")
    return rate


def run(*words: str, script: Sequence[str] = ()) -> None:
    """Run one iproute2 command, with the lines of `script` as its input."""
    command = " ".join(words) + (f" <<< '{'; '.join(script)}'" if script else "")
    try:
        done = subprocess.run(
            words, input="\n".join(script), capture_output=True, text=True, timeout=_TIMEOUT_S, pass_fds=_HELD.get()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(command, str(error)) from error
    if done.returncode:
        raise CommandError(command, " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; the commands that `run` starts hold it too.

    A command survives if this process is killed. Because it holds the lock, the next process waits for it instead of
    cleaning up while it still creates namespaces.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        token = _HELD.set((file.fileno(),))
        try:
            yield
        finally:
            _HELD.reset(token)


def inside(namespace: str, work: Callable[[], Result]) -> Result:
    """Do `work` inside a namespace, in a thread that enters it; no process is started."""
    done: Future[Result] = Future()

    def enter() -> None:
        try:
            with (NAMESPACES / namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    try:
        return done.result()
    except OSError as error:
        raise ThinwireError(f"cannot work inside namespace {namespace}: {error}") from error


def build(hosts: Sequence[Host], switch: str) -> None:
    """Create all namespaces and links."""
    for namespace in (switch, *(host.namespace for host in hosts)):
        run("ip", "netns", "add", namespace)
        inside(namespace, _disable_ipv6)
    bridge = "stp_state 0 forward_delay 0 mcast_snooping 0 ageing_time 100000000"
    run("ip", "-n", switch, "link", "add", "wire", "up", "type", "bridge", *bridge.split())
    for index, host in enumerate(hosts):
        near = f"{host.interface} address {_HARDWARE.format(index)} mtu 1500 netns {host.namespace}"
        run("ip", "link", "add", *near.split(), "type", "veth", "peer", *f"port{index} mtu 1500 netns {switch}".split())
        inside(host.namespace, partial(_disable_offloads, [host.interface]))
    inside(switch, partial(_disable_offloads, [f"port{index}" for index in range(len(hosts))]))
    # Static neighbour entries, so that no ARP is sent.
    neighbours = {host: f"{host.address} lladdr {_HARDWARE.format(index)}" for index, host in enumerate(hosts)}
    for host in hosts:
        wire = host.interface
        up = ["link set lo up", f"addr add {host.address}/24 brd + dev {wire}", f"link set {wire} up"]
        known = [f"neigh add {neighbours[other]} nud permanent dev {wire}" for other in hosts if other != host]
        run("ip", "-n", host.namespace, "-batch", "-", script=[*up, *known])
    # A port that is up before it joins the bridge forwards from its first packet.
    ports = [f"link set port{index} {state}" for state in ("up", "master wire") for index in range(len(hosts))]
    run("ip", "-n", switch, "-batch", "-", script=ports)
    for host in hosts:
        _make_known(host, [other for other in hosts if other != host])


def shape(hosts: Sequence[Host], switch: str, rate: float | None) -> None:
    """Limit both directions of every link to `rate` bit/s; None removes the limit."""
    hold(switch, [f"port{index}" for index in range(len(hosts))], rate)
    for host in hosts:
        hold(host.namespace, [host.interface], rate)


def hold(namespace: str, interfaces: Sequence[str], rate: float | None) -> None:
    """Let no more than `rate` bit/s out of these interfaces."""
    script = [f"qdisc {_tbf(name, rate or _FASTEST)}" for name in interfaces]
    if rate is None:  # set before it is deleted, since deleting a missing qdisc fails
        script += [f"qdisc del dev {name} root" for name in interfaces]
    run("tc", "-n", namespace, "-batch", "-", script=script)


def _tbf(interface: str, rate: float) -> str:
    """The shaper. An idle link may send a burst of 1 ms, at least 16 kB: slow links need about 8 kB to reach their
    rate, and from 64 kB on the kernel does not split TCP's segments. A queue of 50 ms never overflowed in our tests.
    """
    burst = max(16_000, int(rate / 8 * 1e-3))
    limit = burst + max(256_000, int(rate / 8 * 50e-3))
    return f"replace dev {interface} root tbf rate {int(rate)}bit burst {burst} limit {limit}"


def _disable_ipv6() -> None:
    """Disable IPv6: its discovery packets would be counted."""
    for switch in Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):  # also `default`; none without IPv6
        switch.write_text("1")


def _make_known(host: Host, others: Sequence[Host]) -> None:
    """Let the bridge learn the host's port, so that it floods nothing later: broadcast until all others have heard it.

    A link that has just been set up may lose a packet.
    """
    before = [other.counters().received_packets for other in others]
    for attempt in range(_ATTEMPTS):
        if attempt % _PATIENCE == 0:
            inside(host.namespace, _announce)
        if all(other.counters().received_packets > count for other, count in zip(others, before, strict=True)):
            return
        time.sleep(0.01)
    raise ThinwireError(f"{host.namespace} was not heard by the other hosts; its link does not work")


def _announce() -> None:
    """Broadcast one datagram."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(b"", ("10.77.0.255", 9))


def _disable_offloads(interfaces: Sequence[str]) -> None:
    """Turn segmentation offload off: with it the kernel counts 64 kB as one packet with one header."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for interface in interfaces:
            for name, (get, put) in _OFFLOADS.items():
                _ethtool(sock, interface, put)
                if _ethtool(sock, interface, get):
                    raise ThinwireError(f"{name} cannot be disabled on {interface}; packets cannot be counted here")


def _ethtool(sock: socket.socket, interface: str, command: int) -> int:
    """Issue one ETHTOOL command with value 0; returns the resulting value."""
    value = array.array("I", [command, 0])
    fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), value.buffer_info()[0]))
    return value[1]


# Plain Python scripts: importing Thinwire would load torch first.
_RECEIVER = """
import socket, sys, time
socket.setdefaulttimeout(10)
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peer = server.accept()[0]
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(int(sys.argv[2])):
    peer.sendall(peer.recv(1))
buffer = bytearray(1 << 20)
size = peer.recv_into(buffer)
begin, first, last, total = time.perf_counter(), 0, 0, 0
while size and not (first and last > first + 1.0):  # from `first` on: a busy machine may be late
    size = peer.recv_into(buffer)
    last = time.perf_counter()
    if first:
        total += size
    elif last > begin + 0.2:  # the initial burst is over
        first = last
print(total * 8 / (last - first))
"""
_SENDER = """
import contextlib, socket, statistics, sys, time
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(int(sys.argv[3])):
    begin = time.perf_counter()
    peer.sendall(b"-")
    peer.recv(1)
    times.append(time.perf_counter() - begin)
print(statistics.median(times) / 2, flush=True)
with contextlib.suppress(OSError):  # until the receiver closes the connection
    while True:
        peer.sendall(bytes(1 << 18))
"""


def measure(sender: Host, receiver: Host, rounds: int = 200) -> Probe:
    """Measure throughput for about a second, and the latency of one byte."""
    with _python(receiver, _RECEIVER, receiver.address, str(rounds)) as receiving:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip() or "0"
        with _python(sender, _SENDER, receiver.address, port, str(rounds)) as sending:
            try:
                received, sent = (process.communicate(timeout=_TIMEOUT_S) for process in (receiving, sending))
                return Probe(bits_per_second=float(received[0]), latency_s=float(sent[0]))
            except subprocess.TimeoutExpired:
                raise ThinwireError(f"{receiver.address} received nothing for {_TIMEOUT_S} s") from None
            except ValueError:
                last_line = (received[1] + sent[1]).strip().splitlines()[-1:]
                raise ThinwireError(f"the link could not be measured: {' '.join(last_line)}") from None


@contextlib.contextmanager
def _python(host: Host, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A plain Python process on a host, killed on exit."""
    command = host.command([sys.executable, "-I", "-S", "-c", *words])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
