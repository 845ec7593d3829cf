"""`thinwire netbench`: real hosts, real workers, the kernel's counters; and what it says when it cannot."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gang
import needs
from every_method import BUILT_IN
from patience import until
from selection import slow_but
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.comm.backends import INTERFACE
from thinwire.comm.ledger import Interface, Ledger
from thinwire.launch.jobs import Job, Variant, variants
from thinwire.netbench import hosts
from thinwire.netbench.bench import _agreement, _sum
from thinwire.plan import compute
from thinwire.plan import ranks as predicted
from thinwire.plan.compute import given
from thinwire.plan.forecast import Forecast, Layout
from thinwire.plan.planner import Stopwatch
from thinwire.plan.workload import of_recipe
from thinwire.train import fit

SOURCES = Path(__file__).parents[1] / "src"
needs_hosts = needs.root(hosts.why_not())

# The ledger meets the counters.

# Every method there is, every other wire it has, and settings under which the thrifty ones send more than a little.
EXTRA = """allreduce:wire=bf16 allreduce:wire=int8 ab-paper:wire=bf16 powersgd:rank=16 localsgd:every=6:wire=bf16
    diloco:every=6:wire=int8 daso:every=4 daso:wire=int8:every=4:overlap=2:sharded=true topk:density=0.2"""
SHORT = {"ab": "ab:every=3:factor_at=8"}
"""Methods whose defaults need more steps than these runs have."""
VARIANTS = [
    *(SHORT.get(name, name) for name in BUILT_IN),
    *(label for label in EXTRA.split() if label.split(":")[0] in BUILT_IN),
]
QUICK = ("ab-paper",)
STEPS = 16
PAYLOAD = 1448
"""Bytes of data in a full packet."""


def job_of(variant: Variant, out: Path) -> Job:
    base = Job(recipe="digits", method="", out=out, workers=4, steps=STEPS, eval_every=STEPS)
    return base.of(variant, out=out / variant.folder)


def trained(rank: int, folder: str, labels: list[str]) -> dict[str, dict[str, Any]]:
    """A run of every variant, one after the other in the same workers, and its summary."""
    jobs = {variant.label: job_of(variant, Path(folder)) for variant in variants(",".join(labels), ())}
    return {label: fit(job.trained, job.config, out=job.out, model=False) for label, job in jobs.items()}


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The folder of all runs and the summary of one; those that are as quick, or slow, run with it.

    Two hosts of two workers each: what stays inside a host is not on its link, and not among its slow bytes.
    """
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def of(quick: bool) -> dict[str, dict[str, Any]]:
        labels = [label for label in VARIANTS if (label in QUICK) == quick]
        with hosts.Hosts(count=2, rate=1e9, name=f"twgang{os.getpid()}") as lab:
            return gang.run(trained, 4, str(folder), labels, hosts=lab.hosts)[0]

    return lambda label: (folder, of(label in QUICK)[label])


def assert_agreement(traffic: dict[str, Any]) -> None:
    """Within 3 % when headers are taken off, and a little a call: connections, gloo's own headers, barriers."""
    phases = {name: _agreement(row) for name, row in traffic["by_phase"].items()}
    calls = {name: row["slow_calls"] for name, row in traffic["by_phase"].items()}
    whole = {"whole": _sum(phases)}
    for name, part in (phases | whole).items():
        most = 0.03 * part["ledger_bytes"] + 1500 * (1 + calls.get(name, traffic["slow_calls"]))
        most += PAYLOAD * part["resent_packets"]  # on a busy machine acknowledgements come late
        assert 0 <= part["left_bytes"] <= most, (name, part)


@needs_hosts
@pytest.mark.parametrize("label", slow_but(QUICK, VARIANTS))
def test_the_ledger_counts_what_leaves_each_host(label: str, summaries: Any) -> None:
    folder, found = summaries(label)
    traffic = found["traffic"]
    assert found["nodes"] == [[0, 1], [2, 3]]
    assert_agreement(traffic)
    # A plan says the same, where bytes depend on data with the ranks that the run itself found.
    (variant,) = variants(label, ())
    job = job_of(variant, folder)
    workload = of_recipe(job.trained, 4)
    watch, layout = Stopwatch(workload, given(0.1)), Layout(workers=4, nodes=2)
    plan = Forecast(workload, job.config, layout, predicted.typical, watch, lambda r: 0.0)
    if plan.depends_on_ranks:
        plan = Forecast(workload, job.config, layout, predicted.Recorded(job.out), watch, lambda r: 0.0)
    assert plan.ledger.slow_bytes == traffic["slow_bytes"]


@pytest.mark.slow
@needs_hosts
def test_a_flat_ring_over_pairs_puts_one_and_a_half_of_the_gradients_on_every_link(summaries: Any) -> None:
    _, plain = summaries("allreduce")
    assert plain["traffic"]["by_purpose"]["gradients"]["slow_bytes"] == 1.5 * 4 * plain["parameters_full"] * STEPS


@pytest.mark.slow
@needs_hosts
def test_the_command_measures_and_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setattr(compute, "_LEAST_S", 0.1)
    words = ["--methods", "ab-paper", "--rates", "1Gbit", "--steps", "20", "--name", f"twbench{os.getpid()}"]
    result = CliRunner().invoke(main, ["netbench", "digits", "--out", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "netbench.json").read_text())
    (row,) = found["rates"][0]["methods"]
    assert row["method"] == "ab-paper" and "ab-paper" in result.output
    assert row["planned"]["steps_by_phase"] and row["planned"]["seconds_per_step"] > 0
    # Counters of the hosts themselves hold every phase, and starting and ending the job.
    outside = [host["sent_bytes"] for host in row["hosts"]]
    assert sum(outside) / len(outside) >= row["whole"]["kernel_bytes"] > row["whole"]["ledger_bytes"] > 0
    assert 0 <= row["stolen"] <= 1 and row["step_s"] > 0 and row["speedup"] is None
    assert_agreement(json.loads((Path(row["out"]) / "summary.json").read_text())["traffic"])
    assert row["planned_with_ranks"]["traffic"]["slow_bytes"] == row["whole"]["ledger_bytes"]
    # Plain all-reduce ran as well, to calibrate by.
    plain = json.loads((tmp_path / "calibration" / "summary.json").read_text())
    assert found["calibration"]["slowdown"] > 0 and plain["nodes"] == [[0], [1]]
    assert_agreement(plain["traffic"])


# Nothing is left behind.


def inhabitants(name: str) -> list[str]:
    """Namespaces of that name, and processes in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [word for word in listed if word.startswith(name)]


def long_bench(out: str, name: str) -> None:
    os.environ["PYTHONPATH"] = str(SOURCES)
    words = ["--name", name, "--methods", "allreduce", "--rates", "10Mbit", "--steps", "500"]
    main(["netbench", "digits", "--out", out, *words])


@pytest.mark.slow
@needs_hosts
def test_killed_while_workers_train_it_leaves_nothing(tmp_path: Path) -> None:
    name = f"twkill{os.getpid()}"
    process = gang.start(long_bench, str(tmp_path), name)
    until(lambda: list(tmp_path.glob("*/records.jsonl")) or not process.is_alive(), "the first step")
    assert process.is_alive()
    workers = workers_of(tmp_path)
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not workers_of(tmp_path), "the workers to leave with their launcher")
    process.join()
    assert sorted(hosts.clean()) == sorted([f"{name}-h0", f"{name}-h1", f"{name}-switch"])
    assert not inhabitants(name)
    assert not Path("/run/thinwire", f"{name}.json").exists()


def workers_of(out: Path) -> list[int]:
    """Processes whose command line names that folder."""
    alive = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if str(out).encode() in words:
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
        (("digits", "--rates", "fast"), "is not a valid rate"),
        (("digits", "--rates", ","), "has no rate"),
        (("digits", "--hosts", "1"), "no link between them"),
        (("digits", "--hosts", "2", "--workers", "3"), "divided evenly over 2 hosts"),
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
    with pytest.raises(ConfigError, match=f"`{INTERFACE}`='nosuch0'.*choose from: .*lo"):
        Interface("nosuch0")


def test_phases_take_what_the_kernel_sent_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(1000, 10, 0), (1500, 12, 1), (1500, 12, 1), (4500, 20, 4), (4500, 20, 4), (4500, 20, 4)])
    interface = Interface("lo")
    monkeypatch.setattr(interface, "read", lambda: next(readings))
    ledger = Ledger(interface=interface)
    ledger.phase = "warmup"
    ledger.phase = "warmup"
    ledger.phase = "groups"
    assert {phase: tuple(counted) for phase, counted in ledger.kernel.items()} == {
        "attach": (500, 2, 1),
        "warmup": (3000, 8, 3),
        "groups": (0, 0, 0),
    }
