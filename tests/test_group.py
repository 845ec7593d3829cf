"""A launcher of one group, which starts it again when it dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launchers import free_port, start_store
from patience import until
from thinwire.cli import main

THINWIRE = [sys.executable, "-m", "thinwire"]
WHERE = ["--store", "127.0.0.1:29400", "--groups", "2", "--group", "1"]


def launched(code: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    command = [*THINWIRE, "group", *WHERE, *options, "--", sys.executable, "-c", code]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, **more)


def test_a_group_that_dies_is_started_again_with_its_number(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    code = (
        "import os, pathlib, sys; e = os.environ\n"
        f"t = pathlib.Path({str(tries)!r}); n = len(t.read_text()) if t.exists() else 0; t.write_text('x' * (n + 1))\n"
        "print(e['THINWIRE_STORE'], e['THINWIRE_GROUP'], e['THINWIRE_GROUPS'], e['THINWIRE_RUN'])\n"
        "sys.exit(0 if n else 9)"
    )
    process = launched(code, "--run", "mine")
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "127.0.0.1:29400 1 2 mine\n" * 2)
    assert "the group ended with exit code 9 after" in said and "it is started again in 1 s" in said


LIKE_TORCHRUN = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}]); raise SystemExit(1)"
STOPPED = "import sys; from thinwire.elastic import stopping; sys.exit(stopping.exit_code())"


@pytest.mark.parametrize(("code", "ends_with"), [("raise SystemExit(2)", 2), (LIKE_TORCHRUN.format(STOPPED), 75)])
def test_what_was_asked_to_stop_or_refused_stays_ended(code: str, ends_with: int) -> None:
    """torchrun ends with 1, whatever its workers end with."""
    process = launched(code)
    process.communicate(timeout=60)
    assert process.returncode == ends_with


@pytest.mark.slow
def test_a_group_that_dies_at_once_each_time_is_given_up() -> None:
    process = launched("import os; os.kill(os.getpid(), 9)", "--restarts", "1")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "the group ended by signal 9 2 times in a row, each time within 60 s of its start" in said


def test_what_cannot_be_started_is_named() -> None:
    command = [*THINWIRE, "group", *WHERE, "--", "no-such-command"]
    found = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    said = "thinwire: 'no-such-command' cannot be started (No such file or directory)\n"
    assert (found.returncode, found.stderr) == (1, said)
    command = [*THINWIRE, "group", *WHERE[:-1], "2", "--", "true"]
    found = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert found.returncode == 2 and "give host:port, a number from 0 on, and how many groups there are" in found.stderr


@pytest.mark.slow
def test_a_signal_reaches_the_workers_and_nothing_is_left(tmp_path: Path) -> None:
    """A worker of a launcher that is killed is ended too, before the group is started again."""
    worker, pid = "import time; time.sleep(300)", tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True)\n"
        f"f = pathlib.Path({str(pid)!r}); before = f.read_text() if f.exists() else ''\n"
        "f.write_text(before + f'{p.pid} ')\n"
        "import os, signal\n"
        "if len(f.read_text().split()) == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True); time.sleep(300)"
    )
    process = launched(code)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    first, second = map(int, pid.read_text().split())
    until(lambda: not Path(f"/proc/{first}").exists(), "the end of the first one's worker")
    assert Path(f"/proc/{second}").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    until(lambda: not Path(f"/proc/{second}").exists(), "the end of the worker")


def test_a_run_says_what_it_lacks_to_be_a_group() -> None:
    found = CliRunner().invoke(main, ["run", "digits", "--method", "ab", "--store", "here:1", "--groups", "2"])
    assert found.exit_code == 2 and "faults=… needs THINWIRE_GROUP in the environment" in found.stderr


@pytest.mark.slow
def test_two_groups_from_nothing_of_which_one_is_killed(tmp_path: Path) -> None:
    """As on two machines: a store, and a launcher each; a killed group comes back by itself."""
    port = free_port()
    store = start_store(port)
    run = [*THINWIRE, "run", "digits", "--faults", "timeout=20", "--method", "localsgd:every=4", "--quiet"]
    run += ["--epochs", "40", "--out", str(tmp_path / "run")]
    groups = []
    for number, command in enumerate((run, [*THINWIRE, "group", "--", *run])):
        where = ["--store", f"127.0.0.1:{port}", "--groups", "2", "--group", str(number)]
        at = command.index("--") if "--" in command else len(command)
        words = [*command[:at], *where, *command[at:]]
        one = os.environ | {"OMP_NUM_THREADS": "1"}
        groups.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=one))
    records = tmp_path / "run" / "records.jsonl"
    until(lambda: records.is_file() and len(records.read_text().splitlines()) > 3, "the first steps")
    children = Path(f"/proc/{groups[1].pid}/task/{groups[1].pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    said = [group.communicate(timeout=200)[1] for group in groups]
    store.kill()
    assert [group.returncode for group in groups] == [0, 0], said
    assert "the group ended by signal 9" in said[1]
    assert "joined after step" in said[0] or "joins a run that is under way" in said[1], said
