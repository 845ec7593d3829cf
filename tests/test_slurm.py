"""srun: workers find their places in SLURM's variables alone, and the job scripts of examples/slurm stop in order."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from patience import LIMIT_S, until
from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.comm import slurm
from thinwire.comm.topology import complete_environment, place

ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, where srun, scontrol and thinwire are on the path."""
    commands = {
        "srun": f'exec "{sys.executable}" "{ROOT / "tests" / "fake_srun.py"}" "$@"',
        "scontrol": f'echo "$@" >> "{tmp_path / "scontrol"}"',
        "thinwire": f'exec "{sys.executable}" -m thinwire "$@"',
        "python": f'exec "{sys.executable}" "$@"',
    }
    for name, line in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{line}\n")
        path.chmod(0o755)
    found = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(Path(thinwire.__file__).parents[1])}
    return os.environ | JOB | found | {"OMP_NUM_THREADS": "1"}


# Where workers are.


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("gpu7", ["gpu7"]),
        ("a1,b[9-11],c-2", ["a1", "b9", "b10", "b11", "c-2"]),
        ("rack[1-2]n[08-09]x", ["rack1n08x", "rack1n09x", "rack2n08x", "rack2n09x"]),
        ("", []),
    ],
)
def test_node_lists(nodelist: str, names: list[str]) -> None:
    assert slurm.hosts(nodelist) == names


def test_a_strange_node_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'node\[x\]' is not a valid node list of SLURM; export MASTER_ADDR"):
        slurm.hosts("node[x]")


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3), (9, 3)])
def test_tasks_of_each_node(node: int, tasks: int) -> None:
    step = {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)}
    assert slurm.tasks_here(step) == tasks


@pytest.mark.parametrize(
    ("step", "address"),
    [
        ({"SLURM_STEP_NODELIST": "node[01-03,07]", "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.9"}, "node01"),
        ({"SLURM_STEP_NODELIST": "node03"}, "127.0.0.1"),
        ({"SLURM_LAUNCH_NODE_IPADDR": "192.0.2.9"}, "192.0.2.9"),
        ({}, None),
    ],
)
def test_where_the_first_task_is(step: dict[str, str], address: str | None) -> None:
    assert slurm.address(step) == address


def test_jobs_and_steps_have_ports_of_their_own() -> None:
    steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in (812_345, 812_346) for step in (0, 1)]
    found = [slurm.port(step) for step in steps]
    assert len(set(found)) == 4 and all(20_000 <= port < 32_000 for port in found)
    assert slurm.port({}) == 20_000


def test_the_environment_is_completed_and_what_is_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "5"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    here = place()
    assert here == (6, 7, 2, 3)
    complete_environment(here)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("n1", "20005")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    complete_environment(here)
    assert os.environ["MASTER_ADDR"] == "10.0.0.1"


# Two real processes.


@pytest.mark.slow
def test_srun_thinwire_run(tmp_path: Path, cluster: dict[str, str]) -> None:
    words = [
        "srun",
        "thinwire",
        "run",
        "digits",
        "--method",
        "localsgd",
        "--steps",
        "4",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(words, env=cluster, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["steps"] == 4
    assert done.stdout.count("slow link") == 1  # rank 0 alone prints


@pytest.mark.slow
def test_srun_python_train(tmp_path: Path, cluster: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("""
import torch, thinwire
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
for step in range(3):
    replica(torch.ones(8, 4) * (1 + replica.topology.rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
replica.finish()
found = (replica.topology.rank, replica.topology.world_size, float(model.weight.detach().sum()))
print("%d %d %r\\n" % found, end="", flush=True)  # in one piece: two workers write at once
""")
    done = subprocess.run(["srun", "python", str(script)], env=cluster, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    (first, second) = sorted(line.split() for line in done.stdout.splitlines())
    assert first[:2] == ["0", "2"] and second[:2] == ["1", "2"] and first[2] == second[2]


# The job scripts.


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_bash(template: Path) -> None:
    subprocess.run(["bash", "-n", str(template)], check=True)
    text = template.read_text()
    assert text.startswith("#!/bin/bash\n") and "--signal=B:TERM@120" in text and "scontrol requeue" in text
    assert {"one-node", "two-nodes", "many-nodes", "groups"} == {path.stem for path in TEMPLATES}


def test_the_script_of_a_search_is_bash_and_ends_before_its_time() -> None:
    """A search ends by itself, at its own time limit, so it needs no trap."""
    script = ROOT / "examples" / "tune.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "--time=12:00:00" in script.read_text() and "--time-limit 11h" in script.read_text()
    assert units.seconds("11h") < 12 * 3600


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (1, False)])
def test_a_job_that_was_stopped_goes_back_to_the_queue(
    tmp_path: Path, cluster: dict[str, str], code: int, requeued: bool
) -> None:
    """With a step that waits for SIGTERM and then takes a moment, as a save does."""
    ready, script = tmp_path / "ready", tmp_path / "train.py"
    script.write_text(f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), sys.exit({code})))
pathlib.Path({str(ready)!r}).touch()
time.sleep(100)
""")
    words = ["bash", str(ROOT / "examples" / "slurm" / "many-nodes.sbatch"), str(script)]
    job = subprocess.Popen(words, env=cluster | {"SLURM_NTASKS": "1"}, cwd=tmp_path)
    until(ready.exists, "the step")
    job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == code
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == f"requeue {JOB['SLURM_JOB_ID']}\n"


@pytest.mark.rest
@pytest.mark.slow
def test_a_stopped_job_runs_on_where_it_was(tmp_path: Path, cluster: dict[str, str]) -> None:
    words, out = ["bash", str(ROOT / "examples" / "slurm" / "one-node.sbatch")], tmp_path / f"runs/job-{os.getpid()}"
    job = subprocess.Popen(words, env=cluster, cwd=tmp_path)
    until((out / "records.jsonl").exists, "the first step")
    job.send_signal(signal.SIGTERM)
    assert job.wait(LIMIT_S) == 75 and (tmp_path / "scontrol").exists()
    (saved,) = (out / "checkpoint").iterdir()
    assert not (out / "summary.json").exists() and saved.name.startswith("step-")
    assert subprocess.run(words, env=cluster, cwd=tmp_path, timeout=LIMIT_S).returncode == 0
    steps = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    numbers = [record["step"] for record in steps if record["kind"] == "step"]
    assert numbers == list(range(1, 601)) and (out / "summary.json").exists()
