"""`thinwire netbench`: real hosts, real workers, the kernel's counters; and what it says when it cannot."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from thinwire.cli import main
from thinwire.comm.counters import VARIABLE, Interface
from thinwire.comm.ledger import Ledger
from thinwire.errors import ConfigError
from thinwire.methods.registry import METHODS
from thinwire.netbench import hosts

SOURCES = Path(__file__).parents[1] / "src"
reason = hosts.why_not()
needs_hosts = pytest.mark.skipif(reason is not None, reason=f"hosts cannot be made here: {reason}")


def netbench(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "thinwire", "netbench", "digits", "--out", str(out), *words]
    environment = os.environ | {"PYTHONPATH": str(SOURCES)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def found(out: Path, *words: str) -> dict[str, Any]:
    process = netbench(out, "--name", f"twbench{os.getpid()}", *words)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return json.loads((out / "netbench.json").read_text())


# The ledger meets the counters.

# Every method there is, and every other wire it has.
VARIANTS = [*METHODS, "allreduce:wire=bf16"]


def assert_agreement(row: dict[str, Any]) -> None:
    """Within 3 % when headers are taken off, whole and in each phase that sends more than a little."""
    parts = {name: part for name, part in row["phases"].items() if part["ledger_bytes"] > 500_000}
    assert parts, "no phase sent anything to speak of"
    for name, part in {"whole": row["whole"], **parts}.items():
        assert 0 <= part["left_bytes"] <= 0.03 * part["ledger_bytes"], (row["method"], name, part)
    # What is left in phases that send next to nothing: connections, gloo's headers, barriers.
    for name in row["phases"].keys() - parts.keys():
        assert row["phases"][name]["left_bytes"] < 50_000, (row["method"], name)


@needs_hosts
def test_the_ledger_counts_what_leaves_each_host(tmp_path: Path) -> None:
    """Two hosts of two workers each: what stays inside a host is not on its link, and not among its slow bytes."""
    words = ("--methods", ",".join(VARIANTS), "--rates", "1Gbit", "--workers", "4", "--steps", "30")
    rows = found(tmp_path, *words)["rates"][0]["methods"]
    assert [row["method"] for row in rows] == VARIANTS
    for row in rows:
        assert_agreement(row)
        assert row["planned"]["steps_by_phase"] and row["planned"]["seconds_per_step"] > 0
        # Counters of the hosts themselves hold every phase, and starting and ending the job.
        outside = [host["sent_bytes"] for host in row["hosts"]]
        assert sum(outside) / len(outside) >= row["whole"]["kernel_bytes"]
        assert 0 <= row["stolen"] <= 1 and row["step_s"] > 0
    exact = [row for row in rows if row["planned"]["slow_bytes_range"] is None]
    assert exact
    for row in exact:
        assert row["planned"]["traffic"]["slow_bytes"] == row["whole"]["ledger_bytes"]
    # Where bytes do depend on data, they are exact with the ranks that the run itself found.
    for row in rows:
        if row not in exact:
            assert row["planned_with_ranks"]["traffic"]["slow_bytes"] == row["whole"]["ledger_bytes"]
    # gloo's flat ring over 2 × 2 puts 1.5 of the gradients on every host's link.
    plain = json.loads((Path(rows[0]["out"]) / "summary.json").read_text())
    assert plain["nodes"] == [[0, 1], [2, 3]]
    sent = plain["traffic"]["by_purpose"]["gradients"]["slow_bytes"]
    assert sent == 1.5 * 4 * plain["parameters_full"] * 30


# Nothing is left behind.


def inhabitants(name: str) -> list[str]:
    """Namespaces of that name, and processes in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [word for word in listed if word.startswith(name)]


@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_while_workers_train_it_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    name = f"twkill{os.getpid()}"
    process = netbench(tmp_path, "--name", name, "--methods", "allreduce", "--rates", "10Mbit", "--steps", "500")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/records.jsonl")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    assert process.poll() is None, process.communicate()[0]
    workers = workers_of(tmp_path)
    assert workers
    process.send_signal(how)
    process.communicate(timeout=30)
    if how == signal.SIGKILL:
        assert sorted(hosts.clean()) == sorted([f"{name}-h0", f"{name}-h1", f"{name}-switch"])
    assert not inhabitants(name)
    assert not Path("/run/thinwire", f"{name}.json").exists()
    gone_by = time.monotonic() + 15
    while workers_of(tmp_path) and time.monotonic() < gone_by:
        time.sleep(0.1)
    assert not workers_of(tmp_path)


def workers_of(out: Path) -> list[int]:
    """Processes whose command line names that folder, but netbench itself."""
    alive = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(str(out).encode() in word for word in words) and b"netbench" not in words:
            alive.append(int(entry.parent.name))
    return alive


# Bad input: a sentence each, before anything is made.


def said(*words: str) -> str:
    result = CliRunner().invoke(main, ["netbench", *words])
    assert result.exit_code == 2, result.output
    return result.output


def test_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in said("digits")


def test_without_ip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "iproute2" in said("digits")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("digits", "--rates", "50Gbit"), "unshaped"),
        (("digits", "--rates", "fast"), "is no rate"),
        (("digits", "--rates", ","), "names no rate"),
        (("digits", "--hosts", "1"), "no link between them"),
        (("digits", "--hosts", "2", "--workers", "3"), "spread evenly over 2 hosts"),
        (("digits", "--hosts", "40", "--workers", "4000"), "measure the scheduler"),
        (("digits", "--name", "a b"), "name"),
        (("digits", "--methods", "sgd"), "unknown method 'sgd'"),
        (("digits", "--set", "nosuch=1"), "unknown field"),
        (("nosuch",), "unknown recipe 'nosuch'"),
        ((), "give a RECIPE"),
    ],
)
def test_bad_input(words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(hosts, "_check_machine", lambda: None)
    assert sentence in said(*words)


# Counters of an interface.


def test_an_interface_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"`{VARIABLE}`='nosuch0'.*choose from: .*lo"):
        Interface("nosuch0")


def test_phases_take_what_the_kernel_sent_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1000, 10), (1500, 12), (1500, 12), (4500, 20), (4500, 20), (4500, 20)])
    interface = Interface("lo")
    monkeypatch.setattr(interface, "read", lambda: next(readings))
    ledger = Ledger(interface=interface)
    ledger.phase = "warmup"
    ledger.phase = "warmup"
    ledger.phase = "groups"
    assert {phase: tuple(counted) for phase, counted in ledger.kernel.items()} == {
        "attach": (500, 2),
        "warmup": (3000, 8),
        "groups": (0, 0),
    }
