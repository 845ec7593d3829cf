"""Workers on several hosts (network namespaces where possible), and recipes that workers load from a file."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gang
import needs
import thinwire
from patience import LIMIT_S, until
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.launch.failures import TorchrunLog, WorkerError, first_cause
from thinwire.launch.jobs import Job
from thinwire.launch.launcher import HostSpec, launch

# Without hosts.


def test_uneven_workers_and_unreachable_hosts():
    far = HostSpec(address="10.0.0.1")
    with pytest.raises(ConfigError, match="3 workers cannot be divided evenly over 2 hosts; use a multiple of 2"):
        launch([], 3, print, [far, far])
    with pytest.raises(ConfigError, match="2 workers have no host"):
        launch([], 2, print, [])
    with pytest.raises(ConfigError, match="the first of 2 hosts has no address"):
        launch([], 2, print, [HostSpec(), far])
    with pytest.raises(ConfigError, match="cannot be reached by `no-such-command a`"):
        launch([], 2, print, [HostSpec(prefix=("no-such-command", "a"))])
    with pytest.raises(ConfigError, match="divided evenly"):
        Job(recipe="digits", method="allreduce", out=Path("x"), workers=3, hosts=(far, far)).check()


def test_a_job_of_two_hosts_has_two_nodes():
    hosts = (HostSpec(address="10.0.0.1"), HostSpec(address="10.0.0.2"))
    with pytest.raises(ConfigError, match="splits the node of ranks 2 to 3; use a divisor or a multiple of 2"):
        Job(recipe="digits", method="ab-paper", out=Path("x"), workers=4, group_size="3", hosts=hosts).check()


def test_a_failing_prefix_ends_the_job_with_its_output():
    said: list[str] = []
    launch(["run", "digits"], 1, said.append, [HostSpec(prefix=("sh", "-c", 'echo "$@"', "sh"))])
    assert said.pop().endswith("-m torch.distributed.run --nproc-per-node=1 --standalone -m thinwire run digits")
    with pytest.raises(WorkerError, match="the workers exited with code 3: no way there"):
        launch([], 1, said.append, [HostSpec(prefix=("sh", "-c", "echo no way there; exit 3"))])
    assert said == ["no way there"]


TABLE = """
W1115 06:50:21.577000 9 torch/distributed/elastic/multiprocessing/api.py:1 Sending process 12 closing signal SIGTERM
E1115 06:50:21.577000 9 torch/distributed/elastic/multiprocessing/api.py:2 failed (exitcode: 1) local_rank: 0 (pid: 10)
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: {pid})
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 10)
"""


@pytest.mark.parametrize(
    ("kind", "code", "pid", "wanted"),
    [
        ("lost", -9, 11, "worker 3 was killed by SIGKILL; the other workers were stopped"),
        ("lost", -15, 12, "the note"),  # stopped by torchrun: not the cause
        ("lost", 1, 11, "the note"),
        ("consequence", -9, 11, "worker 3 was killed by SIGKILL; the other workers were stopped"),
        ("consequence", 1, 11, "the note"),
        ("cause", -9, 11, "the note"),
        ("config", -9, 11, "the note"),
        (None, -9, 11, "worker 3 was killed by SIGKILL; the other workers were stopped"),
        (None, 7, 11, "the workers exited with code 1"),
    ],
)
def test_the_first_cause_is_reported(kind, code, pid, wanted, tmp_path):
    log = TorchrunLog(workers_per_host=2)
    passed = [line for line in TABLE.format(code=code, pid=pid).splitlines() if log.read_line(1, line)]
    assert passed == [] and log.read_line(0, "another host still speaks")
    if kind:
        other = "the note" if kind == "lost" else "another note"
        (tmp_path / "0.json").write_text(json.dumps({"time": 1, "kind": "lost", "message": other}))
        (tmp_path / "1.json").write_text(json.dumps({"time": 2, "kind": kind, "message": "the note"}))
    error = first_cause(tmp_path, log, 1)
    assert str(error) == wanted
    assert isinstance(error, ConfigError if kind == "config" else WorkerError)


def _wait_for_a_host(file: str) -> None:
    said = Path(f"{file}-said")
    launch([], 1, said.write_text, [HostSpec(prefix=("sh", "-c", f"echo $$ > {file}; exec sleep 100"))])


def _written(file: Path) -> str:
    return until(lambda: file.exists() and file.read_text().strip(), "the process")


def _terminated_while_starting_one(file: str) -> None:
    begin = subprocess.Popen.__init__

    def and_then(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        _written(Path(file))
        os.kill(os.getpid(), signal.SIGTERM)

    subprocess.Popen.__init__ = and_then  # type: ignore[method-assign]
    _wait_for_a_host(file)


@pytest.mark.parametrize("how", [_wait_for_a_host, _terminated_while_starting_one])
def test_a_launcher_that_is_terminated_twice_leaves_no_processes(how, tmp_path):
    process = gang.start(how, str(tmp_path / "pid"))
    number = _written(tmp_path / "pid")
    if how is _wait_for_a_host:
        os.kill(process.pid, signal.SIGTERM)
    assert "a second signal ends at once" in _written(tmp_path / "pid-said")
    os.kill(process.pid, signal.SIGTERM)
    process.join(LIMIT_S)
    assert process.exitcode == 128 + signal.SIGTERM
    assert not Path("/proc", number).exists()


# With hosts.


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        needs.missing("network namespaces", "they need root and the command `ip`")
    names = [f"thinwire-{os.getpid()}-{side}" for side in "ab"]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            needs.missing("network namespaces", error.stderr.strip())
        for number, name in enumerate(names, start=1):
            _ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "wire0")
            for link in ("wire0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
        yield tuple(
            HostSpec(("ip", "netns", "exec", name), f"10.78.0.{number}", {"GLOO_SOCKET_IFNAME": "wire0"})
            for number, name in enumerate(names, start=1)
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _job(out: Path, hosts: tuple[HostSpec, ...], **more) -> Job:
    fields = {"recipe": "digits", "method": "allreduce", "workers": 2, "steps": 20}
    return Job(out=out, hosts=hosts, **(fields | more))


def _workers(mark: str) -> dict[int, int]:
    """Processes of the run whose command line has `mark`: workers by rank, torchruns by −1 − number."""
    found, others = {}, 0
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or mark.encode() not in (entry / "cmdline").read_bytes():
                continue
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(word[5:]) for word in environment if word.startswith(b"RANK=")]
        others += not ranks
        found[ranks[0] if ranks else -others] = int(entry.name)
    return found


def _launch(out: str, hosts: tuple[HostSpec, ...], paths: str) -> None:
    """Launch a long run; the error goes to a file."""
    os.environ["PYTHONPATH"] = paths
    try:
        _job(Path(out), hosts, steps=100000).run(print)
    except WorkerError as error:
        Path(out, "error").write_text(str(error))
        sys.exit(1)


@pytest.mark.slow
@pytest.mark.root
def test_a_worker_killed_on_one_host_is_named_and_ends_the_others(hosts, tmp_path):
    out = tmp_path / "run"
    process = gang.start(_launch, str(out), hosts, str(Path(thinwire.__file__).parents[1]))
    until(lambda: not process.is_alive() or (out / "records.jsonl").exists(), "the first step")
    assert len(_workers(str(out))) == 4  # two torchruns, two workers
    os.kill(_workers(str(out))[1], signal.SIGKILL)
    process.join(LIMIT_S)
    assert "worker 1 was killed by SIGKILL; the other workers were stopped" in (out / "error").read_text()
    assert not _workers(str(out))


@pytest.mark.root
def test_a_host_that_fails_to_start_ends_those_that_wait_for_it(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.launch.launcher._OTHERS_REPORT_S", 1)
    bad = HostSpec(("sh", "-c", "echo no such host; exit 1"), "10.78.0.2")
    with pytest.raises(WorkerError, match="exited with code 1"):
        _job(tmp_path / "run", (hosts[0], bad)).run(lambda line: None)
    assert not _workers(str(tmp_path))


# Recipes from a file.

MY_RECIPE = """
from dataclasses import replace
from thinwire.recipes import digits
def tiny():
    return replace(digits(), name="tiny", steps=10)
def nothing():
    return 5
def broken():
    return 1 / 0
"""


def test_a_recipe_runs_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "recipe.py").write_text(MY_RECIPE)
    words = ["run", "my/recipe.py:tiny", "--method", "allreduce", "--workers", "1", "--no-model", "--json"]
    summary = json.loads(CliRunner().invoke(main, words).stdout)
    assert (summary["recipe"], summary["steps"]) == ("tiny", 10)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tiny-allreduce-seed0"]
    result = CliRunner().invoke(main, [*words, "--resume"])
    assert json.loads(result.stdout) == summary


@pytest.mark.slow
def test_workers_load_it_too_and_their_error_is_printed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(thinwire.__file__).parents[1]))  # whole, as the folder changes
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MY_RECIPE)
    words = ["run", "mine.py:tiny", "--method", "ab-paper", "--set", "every=2", "--set", "keep=*"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "nothing to factor" in result.output
    assert "Traceback" not in result.output and result.output.count("thinwire: ") <= 2


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("none.py:tiny", "there is no file `none.py` for the recipe 'none.py:tiny'"),
        ("mine.py", "the recipe 'mine.py' must be FILE.py:FUNCTION"),
        ("mine.txt:tiny", "the recipe 'mine.txt:tiny' must be FILE.py:FUNCTION"),
        ("mine.py:", "the recipe 'mine.py:' must be FILE.py:FUNCTION"),
        ("mine.py:tony", "unknown function of `mine.py` 'tony', choose from: broken, nothing, tiny"),
        ("mine.py:nothing", "the recipe `mine.py:nothing` returned int; it must return a `thinwire.recipes.Recipe`"),
        ("mine.py:broken", "the recipe `mine.py:broken` failed: ZeroDivisionError: division by zero"),
        ("bad.py:tiny", "`bad.py` cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("leaves.py:tiny", "`leaves.py` cannot be imported: SystemExit: 3"),
        ("empty.py:tiny", "`empty.py` has no functions; write `tiny` there, which returns the recipe"),
    ],
)
def test_a_failing_recipe_file_is_one_clear_sentence(recipe, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MY_RECIPE)
    (tmp_path / "bad.py").write_text("import no_such_thing\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "empty.py").write_text("")
    result = CliRunner().invoke(main, ["run", recipe, "--method", "allreduce"])
    assert result.exit_code == 2
    assert result.output.startswith(f"thinwire: {wanted}") and result.output.count("\n") == 1
    assert not (tmp_path / "runs").exists()
