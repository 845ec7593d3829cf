"""Hosts on one machine: what they count, how fast their links are, and that nothing of them is ever left behind."""

import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gang
import needs
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.netbench import hosts as netbench
from thinwire.netbench import namespaces
from thinwire.netbench.hosts import Host, Hosts, check, clean, parse_rate, why_not

NAME = f"twtest{os.getpid()}"
NAMES = (f"{NAME}-switch", f"{NAME}-h0", f"{NAME}-h1")
REASON = why_not()
real = needs.root(REASON)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    if REASON is None:
        clean(NAME, include_kept=True)
        assert left() == []


def left(name: str = NAME) -> list[str]:
    """Namespaces and records of this name."""
    places = (namespaces.NAMESPACES.glob(f"{name}-*"), Path("/run/thinwire").glob(f"{name}.json"))
    return sorted(str(path) for found in places for path in found)


def runs(pid: int) -> bool:
    return netbench._start_time(pid) is not None


def sleeper(host: Host) -> "subprocess.Popen[bytes]":
    """A process that would stay on a host for long; returns once it is there."""
    process = subprocess.Popen(host.command(["sh", "-c", "echo; exec sleep 100"]), stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process


def send(source: Host, target: Host, size: int) -> float:
    """Send `size` bytes over a plain socket; returns the seconds until the last has come."""
    server = namespaces.inside(target.namespace, lambda: socket.create_server((target.address, 0)))
    address = server.getsockname()
    with server, namespaces.inside(source.namespace, lambda: socket.create_connection(address, 5)) as out:
        peer = server.accept()[0]
        begin = time.perf_counter()

        def talk() -> None:
            out.sendall(bytes(size))
            out.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=talk)
        thread.start()
        with peer:
            assert sum(iter(lambda: len(peer.recv(1 << 20)), 0)) == size
        thread.join()
        return time.perf_counter() - begin


def _own(name: str, pipe: Any) -> None:
    with Hosts(name=name) as hosts:
        pipe.send(sleeper(hosts.hosts[1]).pid)
        time.sleep(100)


@contextmanager
def owner(name: str = NAME) -> Iterator[tuple[Any, Any]]:
    """Another process that makes hosts and holds them, and the pipe that tells the id of a process inside.

    From a server that has torch loaded: a fresh one would spend seconds on that, and one forked from here, where
    other tests have left threads, may never come to anything.
    """
    read, write = gang.context.Pipe(duplex=False)
    process = gang.context.Process(target=_own, args=(name, write), daemon=True)
    process.start()
    write.close()
    try:
        yield process, read
    finally:
        process.kill()
        process.join()
        read.close()


# What hosts are.


@real
def test_hosts_reach_each_other_and_nothing_else():
    before = os.listdir("/sys/class/net")
    with Hosts(count=3, name=NAME) as hosts, socket.create_server(("127.0.0.1", 0)) as machine:
        assert [host.address for host in hosts.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
        first, second, third = hosts.hosts
        for source, target in ((first, second), (second, third), (third, first)):
            assert send(source, target, 1000) < 5
        assert os.listdir("/sys/class/net") == before
        routes = subprocess.run(["ip", "-n", first.namespace, "route"], capture_output=True, text=True).stdout
        assert [line.split()[0] for line in routes.splitlines()] == ["10.77.0.0/24"]
        for place, code in ((machine.getsockname(), errno.ECONNREFUSED), (("192.0.2.1", 9), errno.ENETUNREACH)):
            with pytest.raises(ThinwireError) as caught:
                namespaces.inside(first.namespace, lambda place=place: socket.create_connection(place, 5))
            assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == code


@real
def test_commands_run_on_their_host():
    with Hosts(name=NAME) as hosts:
        words = hosts.hosts[1].command(["ip", "-4", "-o", "addr"])
        assert words[:4] == ["ip", "netns", "exec", f"{NAME}-h1"]
        assert " 10.77.0.2/24 " in subprocess.run(words, capture_output=True, text=True, check=True).stdout


@real
@pytest.mark.parametrize("rate", [None, 1e9])
def test_counters_see_packets_with_their_headers(rate):
    size = 4_000_000
    with Hosts(count=3, rate=rate, name=NAME) as hosts:
        before = hosts.counters()
        send(hosts.hosts[0], hosts.hosts[1], size)
        after = hosts.counters()
    sent = after[0].sent_bytes - before[0].sent_bytes
    packets = after[0].sent_packets - before[0].sent_packets
    # More where the kernel had to send packets again, as it may on a busy machine.
    assert 0.995 < sent / (size + 66 * packets) < 1.1
    assert 1400 < sent / packets <= 1514
    assert after[1].received_bytes - before[1].received_bytes == pytest.approx(sent, rel=0.001)
    assert after[2] == before[2]  # the switch floods nothing, and nobody asks for anything


@real
def test_quiet_hosts_send_nothing():
    with Hosts(name=NAME) as hosts:
        before = hosts.counters()
        time.sleep(1.5)
        assert hosts.counters() == before


@real
def test_links_hold_their_rate_and_can_change_it():
    with Hosts(rate=100e6, name=NAME) as hosts:
        first, second = hosts.hosts
        assert send(first, second, 4_000_000) >= 0.9 * 4e6 * 8 / 100e6
        assert send(second, first, 4_000_000) >= 0.9 * 4e6 * 8 / 100e6
        hosts.shape(20e6)
        assert send(first, second, 1_000_000) >= 0.9 * 1e6 * 8 / 20e6
        for rate in (None, None):  # taking away what is not there is fine
            hosts.shape(rate)
        for namespace in NAMES:
            queues = subprocess.run(["tc", "-n", namespace, "qdisc"], capture_output=True, text=True).stdout
            assert "noqueue" in queues and "tbf" not in queues


@real
def test_probe_measures_the_link():
    with Hosts(rate=50e6, name=NAME) as hosts:
        found = hosts.probe()
        before = hosts.counters()
        time.sleep(0.1)
        assert hosts.counters() == before  # nothing of the probe is still on its way
    assert 0.3 * 50e6 < found.bits_per_second < 1.02 * 50e6
    assert 0 < found.latency_s < 0.1


# Nothing is left behind.


@real
def test_an_exception_leaves_nothing():
    with pytest.raises(KeyError), Hosts(name=NAME) as hosts:
        process = sleeper(hosts.hosts[0])
        raise KeyError
    assert left() == []
    assert process.wait(5) == -signal.SIGKILL


@real
@pytest.mark.parametrize("broken", ["_tbf", "_HARDWARE"])
def test_a_failing_command_is_passed_on_and_leaves_nothing(monkeypatch, broken):
    monkeypatch.setattr(namespaces, broken, {"_tbf": lambda *_: "rubbish", "_HARDWARE": "rubbish"}[broken])
    monkeypatch.setattr(netbench, "_check_machine", lambda: None)
    with pytest.raises(ThinwireError, match=r"`(ip|tc) .*rubbish.*` failed: .+"), Hosts(rate=1e9, name=NAME, keep=True):
        pass
    assert left() == []


@real
def test_sigterm_leaves_nothing():
    with owner() as (process, pipe):
        inside = pipe.recv()
        os.kill(process.pid, signal.SIGTERM)
        process.join()
        assert process.exitcode == 128 + signal.SIGTERM
        assert left() == []
        assert not runs(inside)


@real
def test_a_second_interrupt_leaves_nothing_for_good():
    for pause in (0, 0.001, 0.003, 0.006):
        with owner() as (process, pipe):
            inside = pipe.recv()
            os.kill(process.pid, signal.SIGINT)
            time.sleep(pause)
            os.kill(process.pid, signal.SIGINT)
            process.join()
            clean()
            assert left() == []
            assert not runs(inside)


@real
def test_killed_owners_are_swept():
    moments = [random.Random(0).uniform(0, 0.08) for _ in range(25)]
    for moment in [*moments, 0.1, 0.2, 0.4]:
        with owner() as (process, pipe):
            time.sleep(moment)
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            inside = _said(pipe) if moment > 0.3 else None
            clean()
            assert left() == [], f"killed after {moment} s"
            assert not inside or not runs(inside)


def _said(pipe):
    """What a process left in a pipe; on a busy machine it may have been killed before it said anything."""
    with contextlib.suppress(EOFError):
        return pipe.recv() if pipe.poll() else None


@real
def test_clean_spares_the_living():
    with owner() as (process, pipe):
        inside = pipe.recv()
        assert not set(NAMES) & set(clean(NAME, include_kept=True))
        assert runs(inside)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert clean(f"{NAME}x") == []
        clean(NAME)
        assert left() == []
        assert not runs(inside)


@real
def test_the_next_start_sweeps_whatever_its_name():
    with owner() as (process, pipe):
        pipe.recv()
        os.kill(process.pid, signal.SIGKILL)  # not waited for: one that is dead and unburied owns nothing
        deadline = time.monotonic() + 5
        while runs(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        with Hosts(name=f"{NAME}x"):
            assert left() == []


@real
def test_kept_hosts_stay_until_the_next_of_their_name():
    with Hosts(name=NAME, keep=True) as hosts:
        process = sleeper(hosts.hosts[0])
    assert process.wait(5) == -signal.SIGKILL
    kept = os.stat(namespaces.NAMESPACES / NAMES[1])
    with Hosts(name=f"{NAME}x"):
        assert not set(clean()) & set(NAMES)
    assert os.path.samestat(kept, os.stat(namespaces.NAMESPACES / NAMES[1]))
    with Hosts(name=NAME):
        assert not os.path.samestat(kept, os.stat(namespaces.NAMESPACES / NAMES[1]))
    assert left() == []
    with Hosts(name=NAME, keep=True):
        pass
    assert sorted(clean(NAME, include_kept=True)) == sorted(NAMES)


# Bad input.


@real
def test_hosts_in_use_are_refused():
    with Hosts(name=NAME):
        there = left()
        with pytest.raises(ConfigError, match=f"`{NAME}` are in use by process {os.getpid()}; give another `--name`"):
            Hosts(name=NAME).__enter__()
        assert left() == there


@real
def test_namespaces_of_others_are_refused_and_spared():
    subprocess.run(["ip", "netns", "add", NAMES[2]], check=True)
    try:
        said = f"{NAMES[2]} exist and were not created by netbench; .*`ip netns delete {NAMES[2]}`.*`--name`"
        with pytest.raises(ConfigError, match=said):
            Hosts(name=NAME).__enter__()
        assert left() == [str(namespaces.NAMESPACES / NAMES[2])]
    finally:
        subprocess.run(["ip", "netns", "delete", NAMES[2]], check=True)


def test_rates():
    assert parse_rate("unshaped") is None
    assert parse_rate("100Mbit") == 100e6
    assert (parse_rate("1Mbit"), parse_rate("10Gbit")) == (1e6, 10e9)
    for bad in ("999kbit", "11Gbit", "1Tbit"):
        with pytest.raises(ConfigError, match=f"{bad}.* from 1 Mbit to 10 Gbit; `unshaped` sets"):
            parse_rate(bad)
    with pytest.raises(ConfigError, match=r"500 kbit/s.* from 1 Mbit"):
        Hosts(rate=5e5)
    with pytest.raises(ConfigError, match="is not a valid rate"):
        parse_rate("quick")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of two cores on which all would work, as far as anybody can see."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(netbench, "_RECORDS", tmp_path)
    monkeypatch.setattr(namespaces, "NAMESPACES", tmp_path / "netns")
    monkeypatch.setattr(namespaces, "run", lambda *words, **_: None)
    yield monkeypatch
    monkeypatch.undo()  # before the fixture that looks at the real machine


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1, "x"), "1 hosts have no link between them; use 2 to 64"),
        ((2, "x", 0), "0 workers per host"),
        (
            (65, "x"),
            "65 hosts with 1 worker each on 2 cores would measure the scheduler .*; use at most 16 hosts",
        ),
        ((9, "x", 2), "9 hosts with 2 workers each on 2 cores .* use at most 8 hosts"),
        ((2, "x", 9), "use at most 8 workers on each of 2 hosts"),
        ((2, "a b"), "'a b' is not a valid name for hosts; .* letters, digits and -"),
        ((2, "a/b"), "is not a valid name for hosts"),
        ((2, "-n"), "is not a valid name for hosts"),
        ((2, ""), "is not a valid name for hosts"),
        ((2, "x" * 33), "up to 32"),
    ],
)
def test_what_is_asked_for_is_checked(machine, arguments, said):
    with pytest.raises(ConfigError, match=said):
        check(*arguments)


def test_what_can_work_is_let_through(machine):
    check(2, "x" * 32, 8)
    machine.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    check(64, "x", 8)
    with pytest.raises(ConfigError, match="use at most 64 hosts"):
        check(65, "x")
    assert why_not() is None


def test_root_is_needed(machine):
    machine.setattr(os, "geteuid", lambda: 1000)
    for attempt in (lambda: check(2, "x"), clean, Hosts(name="x").__enter__):
        with pytest.raises(ConfigError, match="needs root: run it with sudo, or in a container with CAP_SYS_ADMIN"):
            attempt()
    assert "needs root" in str(why_not())


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_the_tools_are_needed(machine, missing):
    machine.setattr("shutil.which", lambda tool: None if tool == missing else f"/sbin/{tool}")
    assert f"`{missing}`" in str(why_not()) and "install iproute2, e.g. apt install iproute2" in str(why_not())


@pytest.mark.parametrize(("tool", "said"), [("ip", "refuses network namespaces"), ("tc", "cannot shape links")])
def test_a_kernel_that_refuses_is_quoted(machine, tool, said):
    def run(*words, **_):
        if words[0] == tool:
            raise namespaces.CommandError(" ".join(words), "Operation not permitted")

    machine.setattr(namespaces, "run", run)
    with pytest.raises(ConfigError, match=rf"{said} \(Operation not permitted\); "):
        check(2, "x")
