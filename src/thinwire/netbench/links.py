"""Hosts made of network namespaces, the links between them, and what a link really gives.

Every host is a namespace with one interface, `wire0`, whose other end is a port of a bridge; the bridge has a
namespace of its own, so the machine's interfaces are never touched. Whatever would add packets that no job sent
(IPv6, ARP, spanning tree, flooding of unknown addresses) is off, and packets are never bigger than the wire allows:
what the kernel counts is what a cable would have carried.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from thinwire.errors import ConfigError, ThinwireError
from thinwire.units import bits_per_second

Result = TypeVar("Result")

NAMESPACES = Path("/var/run/netns")  # where `ip netns` keeps them
_HARDWARE = "02:00:0a:4d:00:{:02x}"
_SLOWEST, _FASTEST = 1e6, 10e9
_PATIENCE_S = 30
_HELD: ContextVar[tuple[int, ...]] = ContextVar("held", default=())

_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL = 0x8946
_OFFLOADS = {"TSO": (0x1E, 0x1F), "GSO": (0x23, 0x24), "GRO": (0x2B, 0x2C)}  # ETHTOOL_G… and ETHTOOL_S…


class CommandError(ThinwireError, RuntimeError):
    """A command of iproute2 failed; the message has the command, `said` what it printed."""

    def __init__(self, command: str, said: str) -> None:
        super().__init__(f"`{command}` failed: {said}")
        self.said = said


@dataclass(frozen=True)
class Counters:
    """What the kernel counted on a host's interface, Ethernet headers included."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


@dataclass(frozen=True)
class Probe:
    """What a link gives: payload of one TCP stream, and the one-way time of a small message."""

    bits_per_second: float
    latency_s: float


@dataclass(frozen=True)
class Host:
    """One namespace that stands for a machine."""

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
    """The rate, if links can be held to it."""
    if not _SLOWEST <= rate <= _FASTEST:
        span = "can be shaped from 1 Mbit to 10 Gbit; `unshaped` leaves the link as it is"
        raise ConfigError(f"{given} is out of range: a link {span}")
    return rate


def run(*words: str, script: Sequence[str] = ()) -> None:
    """Run one command of iproute2, with the lines of `script` as its input."""
    command = " ".join(words) + (f" <<< '{'; '.join(script)}'" if script else "")
    try:
        done = subprocess.run(
            words, input="\n".join(script), capture_output=True, text=True, timeout=_PATIENCE_S, pass_fds=_HELD.get()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(command, str(error)) from error
    if done.returncode:
        raise CommandError(command, " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; the commands that `run` starts hold it too.

    A command outlives a starter that is killed. Holding the lock, it makes the next one wait, who would otherwise
    clean up before the command has left its last namespace.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        token = _HELD.set((file.fileno(),))
        try:
            yield
        finally:
            _HELD.reset(token)


def inside(namespace: str, work: Callable[[], Result]) -> Result:
    """Do `work` inside a namespace: in a thread that enters it and ends there; no process is started."""
    done: Future[Result] = Future()

    def enter() -> None:
        try:
            with (NAMESPACES / namespace).open() as door:
                if ctypes.CDLL(None, use_errno=True).setns(door.fileno(), _CLONE_NEWNET):
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
    """Make every namespace and link."""
    for namespace in (switch, *(host.namespace for host in hosts)):
        run("ip", "netns", "add", namespace)
        inside(namespace, _silence)
    bridge = "stp_state 0 forward_delay 0 mcast_snooping 0 ageing_time 100000000"
    run("ip", "-n", switch, "link", "add", "wire", "up", "type", "bridge", *bridge.split())
    for index, host in enumerate(hosts):
        near = f"{host.interface} address {_HARDWARE.format(index)} mtu 1500 netns {host.namespace}"
        run("ip", "link", "add", *near.split(), "type", "veth", "peer", *f"port{index} mtu 1500 netns {switch}".split())
        inside(host.namespace, partial(_one_packet_each, [host.interface]))
    inside(switch, partial(_one_packet_each, [f"port{index}" for index in range(len(hosts))]))
    # Everybody knows everybody, so that nobody has to ask for addresses.
    cards = {host: f"{host.address} lladdr {_HARDWARE.format(index)}" for index, host in enumerate(hosts)}
    for host in hosts:
        wire = host.interface
        up = ["link set lo up", f"addr add {host.address}/24 brd + dev {wire}", f"link set {wire} up"]
        known = [f"neigh add {cards[other]} nud permanent dev {wire}" for other in hosts if other != host]
        run("ip", "-n", host.namespace, "-batch", "-", script=[*up, *known])
    # A port that is up before it joins forwards from its first packet on.
    ports = [f"link set port{index} {state}" for state in ("up", "master wire") for index in range(len(hosts))]
    run("ip", "-n", switch, "-batch", "-", script=ports)
    for host in hosts:
        inside(host.namespace, _show_up)


def shape(hosts: Sequence[Host], switch: str, rate: float | None) -> None:
    """Hold both directions of every link to `rate` bit/s; None takes the limit away."""
    hold(switch, [f"port{index}" for index in range(len(hosts))], rate)
    for host in hosts:
        hold(host.namespace, [host.interface], rate)


def hold(namespace: str, interfaces: Sequence[str], rate: float | None) -> None:
    """Let no more than `rate` bit/s out of these interfaces."""
    script = [f"qdisc {_tbf(name, rate or _FASTEST)}" for name in interfaces]
    if rate is None:  # set before it is deleted, since what is not there cannot be
        script += [f"qdisc del dev {name} root" for name in interfaces]
    run("tc", "-n", namespace, "-batch", "-", script=script)


def _tbf(interface: str, rate: float) -> str:
    """The shaper. A quiet link may send 1 ms at once, and at least 16 kB: slow links need about 8 kB to reach their
    rate, and from 64 kB on the kernel need not cut what TCP hands it. 50 ms of queue were never seen to overflow.
    """
    burst = max(16_000, int(rate / 8 * 1e-3))
    limit = burst + max(256_000, int(rate / 8 * 50e-3))
    return f"replace dev {interface} root tbf rate {int(rate)}bit burst {burst} limit {limit}"


def _silence() -> None:
    """No IPv6 here: its discovery would be counted."""
    for switch in Path("/proc/sys/net/ipv6/conf").glob("*/disable_ipv6"):  # `default` too; none without IPv6
        switch.write_text("1")


def _show_up() -> None:
    """One datagram to everybody, so that the bridge knows the port and floods nothing later."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as voice:
        voice.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        voice.sendto(b"", ("10.77.0.255", 9))


def _one_packet_each(interfaces: Sequence[str]) -> None:
    """Turn segmentation offload off: with it the kernel counts 64 kB as one packet with one header."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        for interface in interfaces:
            for name, (get, put) in _OFFLOADS.items():
                _ethtool(door, interface, put)
                if _ethtool(door, interface, get):
                    raise ThinwireError(f"the kernel keeps {name} on at {interface}; packets cannot be counted here")


def _ethtool(door: socket.socket, interface: str, command: int) -> int:
    """Give one ETHTOOL command with the value 0; returns the value that comes back."""
    value = array.array("I", [command, 0])
    fcntl.ioctl(door, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), value.buffer_info()[0]))
    return value[1]


# Runs on plain Python: Thinwire itself would load torch first.
_LISTENER = """
import socket, sys, time
socket.setdefaulttimeout(10)
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
peer = server.accept()[0]
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(int(sys.argv[2])):
    peer.sendall(peer.recv(1))
box = bytearray(1 << 20)
size = peer.recv_into(box)
begin, first, last, total = time.perf_counter(), 0, 0, 0
while size and not (first and last > first + 1.0):  # counted from there: a busy machine may be late
    size = peer.recv_into(box)
    last = time.perf_counter()
    if first:
        total += size
    elif last > begin + 0.2:  # the burst that a quiet link may send at once is over
        first = last
print(total * 8 / (last - first))
"""
_TALKER = """
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
with contextlib.suppress(OSError):  # until the listener has heard enough
    while True:
        peer.sendall(bytes(1 << 18))
"""


def measure(talker: Host, listener: Host, rounds: int = 200) -> Probe:
    """Send over the link for about a second: what goes through, and how long one byte takes."""
    with _python(listener, _LISTENER, listener.address, str(rounds)) as hearing:
        assert hearing.stdout is not None
        port = hearing.stdout.readline().strip() or "0"
        with _python(talker, _TALKER, listener.address, port, str(rounds)) as talking:
            try:
                heard, told = (process.communicate(timeout=_PATIENCE_S) for process in (hearing, talking))
                return Probe(bits_per_second=float(heard[0]), latency_s=float(told[0]))
            except subprocess.TimeoutExpired:
                raise ThinwireError(f"{listener.address} heard nothing for {_PATIENCE_S} s") from None
            except ValueError:
                said = (heard[1] + told[1]).strip().splitlines()[-1:]
                raise ThinwireError(f"the link could not be measured: {' '.join(said)}") from None


@contextlib.contextmanager
def _python(host: Host, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A bare Python on a host, gone at the end."""
    command = host.command([sys.executable, "-I", "-S", "-c", *words])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
