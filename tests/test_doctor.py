"""`thinwire doctor`: one process, two real ones, and real slow links."""

import json
import os
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import CliRunner

import gang
import needs
from patience import LIMIT_S
from thinwire.base.errors import MissingRankError
from thinwire.cli import main
from thinwire.comm.probe import rings
from thinwire.comm.roll_call import RollCall
from thinwire.commands import doctor as command
from thinwire.doctor import links, machine
from thinwire.doctor.machine import blocked, hints
from thinwire.netbench import hosts
from thinwire.netbench import namespaces as shaped
from thinwire.plan.recommend import Choice, Recommendation

STEPS = "40"
SOURCES = Path(__file__).parents[1] / "src"
needs_hosts = needs.root(hosts.why_not())


def _visit(rank: int, words: list[str], environment: dict[str, str], out: str, host: Any = None) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0" if host else str(rank), GROUP_RANK="0")
    if host is not None:
        gang._move_to(host, rank)
        del os.environ["THINWIRE_INTERFACE"]
    os.environ.update(environment)
    result = CliRunner().invoke(main, words)
    printed = {
        "code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "why": repr(result.exception),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(printed), encoding="utf-8")


def visits(
    tmp_path: Path, words: list[str], *own: dict[str, str], lab: hosts.Hosts | None = None, first: int = 0
) -> list[dict[str, Any]]:
    """What the doctor prints on each of some workers, started side by side; `own` are variables of each."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
    meeting = {"MASTER_ADDR": lab.hosts[0].address if lab else "127.0.0.1", "MASTER_PORT": str(port)}
    meeting |= {"WORLD_SIZE": str(len(own)), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    meeting |= {"LOCAL_WORLD_SIZE": "1" if lab else str(len(own))}
    started = [
        gang.start(_visit, rank, words, meeting | each, str(tmp_path), lab.hosts[rank] if lab else None)
        for rank, each in enumerate(own, first)
    ]
    for process in started:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    return [json.loads((tmp_path / f"{first + i}.json").read_text(encoding="utf-8")) for i in range(len(own))]


# One process.


def test_alone_it_looks_at_the_machine_and_says_how_to_measure_links() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    for said in ("Machine", "cores", "torch", "gloo", "netbench", "not measured", "srun thinwire doctor", "torchrun"):
        assert said in result.output
    report = json.loads(CliRunner().invoke(main, ["doctor", "digits", "--json"]).stdout)
    assert report["workers"] == 1 and report["links"] is None and report["advice"] is None
    assert report["nodes"][0]["cores"] >= 1 and report["differences"] == []


def test_bad_input() -> None:
    result = CliRunner().invoke(main, ["doctor", "digits", "--model", "x.py:build"])
    assert result.exit_code == 2 and "not both" in result.output
    result = CliRunner().invoke(main, ["doctor", "--model", "x.py:build"])
    assert result.exit_code == 2 and "give --steps N" in result.output
    result = CliRunner().invoke(main, ["doctor", "numbers"])
    assert result.exit_code == 2 and "numbers" in result.output and "digits" in result.output


# Two workers.


@pytest.mark.slow
def test_two_workers_measure_their_link_and_get_advice(tmp_path: Path) -> None:
    words = ["doctor", "digits", "--compute", "20ms", "--steps", STEPS, "--methods", "allreduce,localsgd", "--json"]
    first, second = visits(tmp_path, words, {}, {})
    assert (first["code"], second["code"]) == (0, 0), first
    assert second["stdout"] == ""
    report = json.loads(first["stdout"])
    assert [(link["source"], link["target"]) for link in report["links"]["inside"]] == [(0, 1), (1, 0)]
    for link in report["links"]["inside"]:
        assert link["bits_per_second"] > 0 and link["round_trip_s"] > 0
    assert report["links"]["between"] == [] and report["nodes"][0]["ranks"] == [0, 1]
    slowest = min(link["bits_per_second"] for link in report["links"]["inside"])
    assert report["advice"]["links"]["bandwidth"] == slowest
    assert report["advice"]["best"]["method"] in ("allreduce", "localsgd") and report["advice"]["why"]


@pytest.mark.slow
def test_workers_that_differ_are_named_and_the_exit_code_is_one(tmp_path: Path) -> None:
    first, second = visits(tmp_path, ["doctor"], {}, {"OMP_NUM_THREADS": "3", "THINWIRE_STORE": "here:1"})
    assert (first["code"], second["code"]) == (1, 0), first
    assert "OMP_NUM_THREADS: 1 on rank 0; 3 on rank 1" in first["stdout"]
    assert "THINWIRE_STORE: not set on rank 0; here:1 on rank 1" in first["stdout"]
    assert "inside a node" in first["stdout"]  # links are measured all the same
    assert second["stdout"] == second["stderr"] == ""


@pytest.mark.parametrize(
    ("rank", "said"), [(0, "2 workers did not meet at 127.0.0.1:"), (1, "rank 0 cannot be reached at 127.0.0.1:")]
)
def test_workers_that_do_not_come_are_missed(tmp_path: Path, rank: int, said: str) -> None:
    (alone,) = visits(tmp_path, ["doctor", "--timeout", "1"], {"WORLD_SIZE": "2"}, first=rank)
    assert alone["code"] == 2 and said in alone["stderr"]


# What is said.


def _node(number: int, chosen: str | None, address: str | None, **known: str) -> dict[str, Any]:
    network = {"interfaces": known, "hostname_address": address, "chosen": chosen, "chosen_for_nccl": None}
    return {"node": number, "backend": "gloo", "network": network}


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (None, "nccl takes one of eth0, wg0 by itself, perhaps a public one: export THINWIRE_INTERFACE=wg0"),
        ("wg0", None),
        ("wg", None),
        ("^eth0", None),
        ("=ib0", "NCCL_SOCKET_IFNAME==ib0, and there is no such interface; choose from: lo, eth0, wg0"),
    ],
)
def test_nccl_needs_a_variable_of_its_own(chosen: str | None, said: str | None) -> None:
    node = _node(0, "wg0", "192.0.2.1", lo="127.0.0.1", eth0="192.0.2.1", wg0="10.77.0.1")
    assert hints([node]) == []  # without GPUs
    node["backend"], node["network"]["chosen_for_nccl"] = "cpu:gloo,cuda:nccl", chosen
    found = hints([node])
    assert found == [] if said is None else said in found[0] and len(found) == 1


def test_interfaces_that_others_cannot_reach_are_hinted_at_once_for_all() -> None:
    lost = [_node(n, None, "127.0.1.1", lo="127.0.0.1", docker0="172.17.0.1", ib0="10.0.0.1") for n in (0, 1)]
    fine = _node(2, None, "10.0.0.3", lo="127.0.0.1", ib0="10.0.0.3")
    (said,) = hints([*lost, fine])
    assert (
        said.startswith("on nodes 0, 1 the hostname resolves to 127.0.1.1") and "export THINWIRE_INTERFACE=ib0" in said
    )
    assert blocked([*lost, fine]) and not blocked([fine, fine]) and not blocked(lost[:1])
    assert hints([fine]) == []
    (said,) = hints([_node(0, "eth9", "10.0.0.3", lo="127.0.0.1", ib0="10.0.0.3")])
    assert "GLOO_SOCKET_IFNAME=eth9, and there is no such interface; choose from: lo, ib0" in said
    (said,) = hints([_node(0, None, "10.0.0.3", ib0="10.0.0.3", eth0="192.0.2.1")])
    assert "several interfaces (ib0, eth0), and gloo takes ib0" in said
    (said,) = hints([_node(0, None, None, eth0="192.0.2.1")])
    assert "does not resolve" in said


def test_this_machine_has_a_loopback() -> None:
    if found := machine.network()["interfaces"]:
        assert found["lo"] == "127.0.0.1"


def test_rings() -> None:
    assert rings([(0, 1), (2, 3, 4), (5,)]) == ([(0, 1), (1, 0), (2, 3), (3, 4), (4, 2)], [(0, 2), (2, 5), (5, 0)])
    assert rings([(0, 1)]) == ([(0, 1), (1, 0)], [])


def test_ranks_in_words() -> None:
    assert command.rank_names([3]) == "rank 3"
    assert command.rank_names([0, 1, 2, 3, 7, 9, 10]) == "ranks 0 to 3, 7, 9 and 10"


def _report(rates: list[float]) -> dict[str, Any]:
    """A job with a worker on each node, whose ring has these rates."""
    about = machine.facts() | {"network": _node(0, None, "10.0.0.1", eth0="10.0.0.1")["network"]}
    nodes = machine.nodes([about | {"machine": str(rank)} for rank in range(len(rates))])
    between = [
        {"source": rank, "target": (rank + 1) % len(rates), "bits_per_second": rate}
        | {"round_trip_s": 3e-4, "interface": "eth0"}
        for rank, rate in enumerate(rates)
    ]
    found = {"between": between, "inside": [], "overhead_s": 1e-4}
    return {"workers": len(rates), "nodes": nodes, "differences": [], "hints": hints(nodes), "links": found}


def test_a_slow_node_is_named() -> None:
    said = command.report_text(_report([9e9, 9.4e9, 1e9, 0.9e9, 9.2e9]))
    assert "slow: node 3 → node 4, 10 times slower than the fastest link" in said
    assert "node 3 is at the end of every slow link" in said
    assert "slow" not in command.report_text(_report([9e9, 9.4e9, 8e9])).split("Links")[1]


def test_machines_that_differ_are_told_apart() -> None:
    report = _report([1e9, 1e9, 1e9])
    report["nodes"][1] |= {"cores": 128, "gpus": ["H200"] * 4}
    here = report["nodes"][0]["cores"]
    said = command.report_text(report)
    assert f"cores     {here} on nodes 0, 2; 128 on node 1" in said and "none on nodes 0, 2; 4 × H200 on node 1" in said


def test_many_links_are_summed_up() -> None:
    said = command.report_text(_report([1e9 + rank for rank in range(64)])).splitlines()
    assert len(said) < 35 and max(map(len, said)) < 400
    assert any(line.strip().startswith("56 others, up to") for line in said)


def test_the_slowest_link_is_what_a_plan_gets() -> None:
    found = links.for_plan(_report([9e9, 1e9])["links"])
    assert (found.bandwidth, found.latency, found.overhead) == (1e9, 1.5e-4, 1e-4)


def test_recommendations_in_words() -> None:
    usual, best = Choice("allreduce", 1.0, 0.1, 1e6), Choice("ab", 8.0, 0.0125, 1e4)
    lines = Recommendation(best=best, baseline=usual, waiting=0.9, closest=Choice("x", 3.0, 0.03, 2e5)).lines()
    assert lines[0] == "Use ab: 12.5 ms per step instead of 100 ms, 8 times as fast as fp32 DDP."
    assert "waits for the link 90 % of the time; ab sends 10 kB, 100 times less" in lines[1]
    assert lines[2].startswith("Closest to DDP: x")
    (only,) = Recommendation(best=usual, baseline=usual, waiting=0.01).lines()
    assert only.startswith("Stay with all-reduce in fp32") and "waits for the link 1 % of the time" in only


def test_a_plan_recommends_its_fastest_method_or_to_stay() -> None:
    words = ["plan", "digits", "--nodes", "2", "--compute", "20ms", "--steps", STEPS, "--json"]
    words += ["--methods", "allreduce,allreduce:wire=int8,localsgd"]
    slow, fast = (
        json.loads(CliRunner().invoke(main, [*words, "--bandwidth", rate]).stdout) for rate in ("10Mbit", "400Gbit")
    )
    rows = {row["method"]: row for row in slow["methods"]}
    advice = slow["recommendation"]
    assert advice["best"]["method"] == max(rows, key=lambda name: rows[name]["speedup"]) == "localsgd"
    assert advice["best"]["speedup"] == rows["localsgd"]["speedup"]
    assert advice["best"]["slow_bytes_per_step"] == rows["localsgd"]["slow_bytes_per_step"]
    assert advice["closest"]["method"] == "allreduce:wire=int8"
    assert fast["recommendation"]["best"] == fast["recommendation"]["baseline"]


# Real slow links.


@needs_hosts
def test_a_slow_link_is_measured_and_named(tmp_path: Path) -> None:
    """Links of 50 Mbit/s, and one of 10: each comes out within 15 %."""
    name = f"twdoc{os.getpid()}"
    with hosts.Hosts(count=3, rate=50e6, name=name) as lab:
        shaped.hold(lab.hosts[2].namespace, [lab.hosts[2].interface], 10e6)
        shaped.hold(f"{name}-switch", ["port2"], 10e6)
        for visit in range(4):  # other work on the machine may hold up a transfer, or a worker that connects
            (folder := tmp_path / str(visit)).mkdir()
            found = visits(folder, ["doctor", "--json"], {}, {}, {}, lab=lab)
            if [each["code"] for each in found] != [0, 0, 0]:
                continue
            report = json.loads(found[0]["stdout"])
            rates = [link["bits_per_second"] for link in report["links"]["between"]]
            if rates == pytest.approx([50e6, 10e6, 10e6], rel=0.15):
                break
        else:
            pytest.fail(f"not once in {visit + 1} visits: {found}")
    assert {link["interface"] for link in report["links"]["between"]} == {"wire0"}
    assert "node 2 is at the end of every slow link" in command.report_text(report)


@needs_hosts
def test_an_interface_that_is_not_there_is_reported_before_gloo_tries(tmp_path: Path) -> None:
    with hosts.Hosts(name=f"twdoc{os.getpid()}") as lab:
        first, second = visits(tmp_path, ["doctor"], {}, {"GLOO_SOCKET_IFNAME": "eth9"}, lab=lab)
    assert (first["code"], second["code"]) == (1, 0)
    assert "on node 1 GLOO_SOCKET_IFNAME=eth9, and there is no such interface" in " ".join(first["stdout"].split())
    assert "gloo cannot connect the workers" in first["stderr"] and "see the hint above" in first["stderr"]


@pytest.mark.rest
@pytest.mark.slow
@needs_hosts
def test_what_it_recommends_is_fastest_when_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    methods, rate = "allreduce,allreduce:wire=int8,localsgd", 50e6
    with hosts.Hosts(rate=rate, name=f"twdoc{os.getpid()}") as lab:
        words = ["doctor", "digits", "--steps", STEPS, "--methods", methods, "--json"]
        first, _ = visits(tmp_path, words, {}, {}, lab=lab)
    advice = json.loads(first["stdout"])["advice"]
    assert advice["links"]["bandwidth"] == pytest.approx(rate, rel=0.15)
    words = ["netbench", "digits", "--steps", STEPS, "--methods", methods, "--rates", "50Mbit", "--json"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "bench"), "--name", f"twdoc{os.getpid()}"])
    assert result.exit_code == 0, result.output
    measured = {row["method"]: row for row in json.loads(result.stdout)["rates"][0]["methods"]}
    assert advice["best"]["method"] == min(measured, key=lambda name: measured[name]["step_s"])
    sent = json.loads(Path(measured[advice["best"]["method"]]["out"], "summary.json").read_text())["traffic"]
    without_evaluation = sent["slow_bytes"] - sent["by_purpose"]["evaluate"]["slow_bytes"]
    assert advice["best"]["slow_bytes_per_step"] == pytest.approx(without_evaluation / int(STEPS), rel=0.01)


def test_a_roll_call_names_who_does_not_answer() -> None:
    call = RollCall.__new__(RollCall)
    call.rank, call.world_size, call._timeout, call._rounds = 0, 3, timedelta(seconds=0.3), 0
    call._store = dist.HashStore()
    call._store.set("thinwire/roll-call/1/1", "{}")
    with pytest.raises(MissingRankError, match=r"^rank 2 of 3 did not answer within 0 s"):
        call.answers({})
    call._timeout = timedelta(seconds=60)
    call._store.set("thinwire/roll-call/2/1", "1")
    late = threading.Timer(0.1, call._store.set, ("thinwire/roll-call/2/2", "2"))
    late.start()
    assert call.answers(0) == [0, 1, 2]
    late.join()
