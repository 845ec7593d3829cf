"""How far a run is: from its records, on terminals, in logs, and from another terminal."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from patience import LIMIT_S, until
from test_report import _write_run
from thinwire.cli import main
from thinwire.comm.times import Clock, Times
from thinwire.commands import watch as watching
from thinwire.commands.watch import Doing
from thinwire.replica.compress import compress
from thinwire.report import live
from thinwire.report.live import Followed, FollowedRun, Lines, in_place, line, panel
from thinwire.report.progress import Progress, Tail
from thinwire.report.tables import duration

ESCAPE = "\x1b"


def start(step: int = 0, **more) -> dict:
    about = {"recipe": "digits", "method": "ab", "config": {}, "metric": "accuracy", "seed": 0, "split": "test"}
    about |= {"steps": 600, "batch": 64, "world_size": 4, "parameters_full": 10}
    about |= {"usual_bytes": 1000 * step, "usual_bytes_at_end": 600_000}
    return {"kind": "start", "step": step, **about, **so_far(step), **more}


def so_far(step: int) -> dict:
    """A tenth of a second per step, a quarter of it waiting; 10 bytes per step and 5 for evaluation."""
    return {"slow_bytes": 15 * step, "evaluate_bytes": 5 * step, "wire_s": 0.025 * step, "wall_s": 0.1 * step}


def taken(step: int, phase: str = "groups") -> dict:
    return {"kind": "step", "step": step, "phase": phase, "loss": 1 / step, "lr": 0.1, **so_far(step)}


def evaluated(step: int, **more) -> dict:
    about = {"kind": "evaluation", "step": step, "phase": "groups", "model": "world", "accuracy": 0.5, "loss": 9.0}
    return about | so_far(step) | more


def write(folder: Path, *records: dict, mode: str = "a") -> None:
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / "records.jsonl").open(mode) as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def progress_of(*records: dict) -> Progress:
    progress = Progress("ab seed 0")
    for record in records:
        progress.update(record)
    return progress


def drawn(progress: Progress, width: int, written: float | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=50)
    console.print(panel(progress, written=written, width=width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_tail_reads_whole_new_lines_and_notices_a_new_file(tmp_path):
    path = tmp_path / "records.jsonl"
    write(tmp_path, taken(98), taken(99))
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    assert [r["step"] for r in tail.read()] == [1] and tail.begins_anew
    with path.open("a") as file:
        file.write('ep", "step": 2}\nnonsense\n{"step": 3}\n')
    assert [r["step"] for r in tail.read()] == [2] and not tail.begins_anew


def test_a_tail_of_a_long_file_reads_all_but_its_early_steps(tmp_path):
    records = [start(), *(taken(i) for i in range(1, 500)), evaluated(499), taken(500), evaluated(500), taken(501)]
    write(tmp_path, *records)
    assert Tail(tmp_path / "records.jsonl", from_start=True).read() == [records[0], *records[-22:]]


def test_figures_are_those_of_the_records():
    progress = progress_of(start(), *(taken(i) for i in range(1, 101)), evaluated(100, ranks={"a": 3, "b": 8}))
    assert (progress.step, progress.steps, progress.phase) == (100, 600, "groups")
    assert progress.loss == pytest.approx(sum(1 / i for i in range(81, 101)) / 20)
    assert progress.figure == 0.5 and progress.sent == 1000 and progress.mean_rank == 5.5
    assert progress.share == pytest.approx(1000 / 100_000)
    assert progress.steps_per_s == pytest.approx(10) and progress.samples_per_s == pytest.approx(640)
    assert progress.waiting == pytest.approx(0.25) and progress.left_s == pytest.approx(50)


def test_speed_is_of_the_last_minute_and_of_this_session():
    slow = [taken(i) | {"wall_s": 0.5 * i} for i in range(1, 401)]
    fast = [taken(400 + i) | {"wall_s": 200 + 0.1 * i} for i in range(1, 1001)]
    assert progress_of(start(), *slow).steps_per_s == pytest.approx(2)
    assert progress_of(start(), *slow, *fast).steps_per_s == pytest.approx(10)
    resumed = progress_of(start(), *slow, start(400, wall_s=200.0), *fast[:50])
    assert resumed.steps_per_s == pytest.approx(10, rel=0.01)
    assert resumed.share == pytest.approx(4500 / 450_000)


def test_what_takes_long_is_named():
    progress = progress_of(start(), taken(1))
    progress.update({"kind": "work", "step": 1, "phase": "groups", "what": "decomposing", "done": 3, "of": 16})
    assert "groups: decomposing, 3 of 16 layers" in line(progress)
    progress.update(taken(2))
    assert "decomposing" not in line(progress)
    progress.update({"kind": "work", "step": 600, "phase": "finishing", "what": "writing the model"})
    text = "\n".join(drawn(progress, 80, time.time() - 42))
    assert "finishing: writing the model, 42 s" in text and "left" not in text and "silent" not in text


def test_the_line_says_what_is_known():
    assert line(Progress("ab seed 0", 600)) == "ab seed 0  starting"
    progress = progress_of(start(), *(taken(i) for i in range(1, 101)), evaluated(100, ranks={"a": 3, "b": 8}))
    assert line(progress) == (
        "ab seed 0  groups  step 100/600  loss 0.0111  accuracy 50.00 % at step 100  "
        "slow link 1.0 kB, 1.0 % of fp32 DDP  waiting 25 % of the time  mean rank 5.5  "
        "10.0 steps/s  640 samples/s  50 s left"
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_panel_fits_and_has_everything(width):
    progress = progress_of(start(), *(taken(i) for i in range(1, 101)), evaluated(100, ranks={"a": 3, "b": 8}))
    lines = drawn(progress, width, time.time())
    assert {len(text) for text in lines} == {min(width, 100)} and len(lines) <= (12 if width < 64 else 8)
    text = "\n".join(lines)
    for figure in ("step 100 of 600", "50 s left", "groups", "0.0111", "50.00 %", "1.0 kB", "25 % of the time"):
        assert figure in text
    for figure in ("10.0 steps/s", "640 samples/s", "5.5", *([] if width < 64 else ["1.0 % of fp32 DDP"])):
        assert figure in text


def test_a_panel_before_the_first_record_says_that_it_starts():
    assert any("starting" in text for text in drawn(Progress("ab seed 0", 600), 80))


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "step", "step": 3, "phase": "\x1b[2J", "slow_bytes": 1},
        {"kind": "step", "step": 3, "phase": "groups", "slow_bytes": "many"},
        {"kind": "work", "step": 3, "phase": "groups", "what": ["a"]},
        {"kind": "start", "step": 3},
        {"kind": "something new", "step": 3},
    ],
)
def test_records_that_are_not_as_they_should_be_are_passed_over(record):
    assert line(progress_of(start(), taken(2), record)) == line(progress_of(start(), taken(2)))


def test_a_run_that_should_have_written_is_silent(tmp_path):
    write(tmp_path / "run", start(), *(taken(i) for i in range(1, 11)))
    run = FollowedRun(tmp_path / "run", Progress("run"), from_start=True)
    run.refresh()
    assert not run.is_silent
    os.utime(tmp_path / "run" / "records.jsonl", (0, time.time() - 300))
    assert run.is_silent
    text = "\n".join(drawn(run.progress, 100, run.written))
    since = time.strftime("%H:%M:%S", time.localtime(run.written))
    assert f"silent since {since}, 5 min 00 s" in text
    write(tmp_path / "run", {"kind": "work", "step": 10, "phase": "groups", "what": "evaluating"})
    os.utime(tmp_path / "run" / "records.jsonl", (0, time.time() - 300))
    run.refresh()
    assert not run.is_silent  # an evaluation may take minutes


def test_a_resumed_run_is_read_anew(tmp_path):
    write(tmp_path, start(), *(taken(i) for i in range(1, 41)))
    run = FollowedRun(tmp_path, Progress("run"), from_start=True)
    run.refresh()
    assert run.progress.step == 40
    write(tmp_path, start(), *(taken(i) for i in range(1, 21)), start(20), taken(21, "factored"), mode="w")
    run.refresh()
    assert (run.progress.step, run.progress.phase) == (21, "factored")
    write(tmp_path, {"kind": "stopped", "step": 21, "steps": 600})
    run.refresh()
    assert run.end == "stopped and saved"
    write(tmp_path, start(21), taken(22))
    run.refresh()
    assert run.end is None


def test_a_log_gets_no_control_codes_and_few_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI services do; it is no terminal for that
    console = Console(file=io.StringIO())
    assert console.is_terminal and not in_place(console)
    run = FollowedRun(tmp_path, Progress("run"), from_start=True)
    lines = Lines(run, console)
    lines.show()
    for i in range(1, 50):
        write(tmp_path, *([start()] if i == 1 else []), taken(i, "warmup" if i < 30 else "groups"))
        lines.show()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert [text.split()[1] for text in said.splitlines()] == ["warmup", "groups"] and ESCAPE not in said


def test_nothing_is_over_while_another_run_may_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_LOOK_EVERY_S", -1.0)
    for name in ("a-seed0", "b-seed0"):
        write(tmp_path / name, start(), taken(1))
    both = Followed([tmp_path])
    assert [run.progress.title for run in both.refresh()] != [] and not both.is_over(both.refresh())
    for name in ("a-seed0", "b-seed0"):
        (tmp_path / name / "summary.json").write_text("{}")
    assert not both.is_over(both.refresh())
    (tmp_path / "comparison.json").write_text("[]")
    assert both.is_over(both.refresh())
    write(tmp_path / "c-seed0", start())
    assert not both.is_over(both.refresh())
    alone = Followed([tmp_path / "a-seed0"])
    assert alone.is_over(alone.refresh())


def test_watch_follows_until_the_run_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "EVERY_S", 0.01)
    write(tmp_path / "run", start(), taken(1))
    with (tmp_path / "run" / "records.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # being written

    def go_on() -> None:
        with (tmp_path / "run" / "records.jsonl").open("a") as file:
            file.write('ep": 2, "phase": "factored", "slow_bytes": 30}\n')
        write(tmp_path / "run", {"kind": "stopped", "step": 2, "steps": 600})

    later = threading.Timer(0.5, go_on)
    later.start()
    result = CliRunner().invoke(main, ["watch", str(tmp_path / "run")])
    later.join()
    assert result.exit_code == 0 and ESCAPE not in result.output
    first, *_, last = result.output.splitlines()
    assert first.startswith("run  groups  step 1/600") and last == "run: stopped and saved after step 2"


@pytest.mark.slow
def test_watch_says_that_it_waits_for_a_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "EVERY_S", 0.01)
    stopped = {"kind": "stopped", "step": 1, "steps": 600}
    later = threading.Timer(0.5, lambda: write(tmp_path, start(), taken(1), stopped))
    later.start()
    result = CliRunner().invoke(main, ["watch", str(tmp_path)])
    later.join()
    first, *_, last = result.output.splitlines()
    assert first == "no run yet; waiting for one, Ctrl-C ends" and last.endswith("stopped and saved after step 1")
    assert result.output.count("no run yet") == 1


def test_watch_of_a_finished_run_ends_at_once_and_of_no_folder_is_an_error(tmp_path):
    _write_run(
        tmp_path / "run",
        "ab",
        0,
        slow=6000,
        accuracy=0.9,
        traffic_vs_allreduce_fp32=0.01,
        wall_s=42.0,
        spent={"computing": 42.0, "finishing": 9.0},
    )
    ended = CliRunner().invoke(main, ["watch", str(tmp_path / "run")]).output
    assert ended == "run: accuracy 90.00 %, slow link 6.0 kB, 1.0 % of fp32 DDP, 42 s\n"
    missing = CliRunner().invoke(main, ["watch", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "does not exist" in missing.output


def test_durations_are_for_people():
    assert [duration(s) for s in (0.4, 59, 60, 3599, 3600, 90_000, 200_000)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 00 min", "2 days 7 h"),
    ]


def test_a_gpu_is_timed_at_every_step_at_first_and_then_at_one_in_sixteen() -> None:
    """A mark on its stream would else hold up small steps."""
    clock, timed = Clock(torch.device("cuda")), []
    for number in range(1, 81):
        clock.begin_step(number)
        timed += [number] if clock.is_timing else []
        assert clock.is_timing or clock.mark() is None
    assert timed == [*range(1, 33), 48, 64, 80]
    clock.begin_step(81)
    clock.time_all()  # an average: not at every step
    assert clock.is_timing


def test_work_after_steps_is_without_waiting_and_decomposing():
    class Account:
        seconds = 0.0

    times = Times(Clock())
    times.enter("phase")
    before = time.perf_counter()
    with times.after_step():
        with times.decomposing():
            time.sleep(0.02)
        mark = times.clock.mark()
        time.sleep(0.02)
        times.waited(mark, times.clock.mark(), Account())
        time.sleep(0.01)
    whole = time.perf_counter() - before
    assert 0.01 <= times.after_steps <= whole - 0.04
    again = Times(Clock())
    again.load_state(times.state())
    assert again.after_steps == pytest.approx(times.after_steps)


def test_long_work_has_single_lines_where_there_is_no_terminal(capsys):
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    far: list[tuple[str, int, int]] = []
    with Doing(Console(file=io.StringIO())) as doing:

        def report(*parts: Any) -> None:
            far.append(parts)  # type: ignore[arg-type]
            doing.update(*parts)

        compress(model, rank=2, report=report)
        doing.update("writing")
    assert far == [("decomposing layers", done, 2) for done in range(2)]  # the first and the last layer stay
    assert capsys.readouterr().err == "decomposing layers …\nwriting …\n"


# Real runs on a terminal.


class Terminal:
    """A command on a terminal of its own; what it shows is read by the test."""

    def __init__(self, *words: object) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
            os.execv(sys.executable, [sys.executable, "-m", "thinwire", *map(str, words)])
        self.shown = ""

    def read(self) -> bool:
        """Read for a moment; False when the command has closed its terminal."""
        if select.select([self._fd], [], [], 0.1)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                return False
            self.shown += data.decode(errors="replace")
            return bool(data)
        return True

    def code(self) -> int:
        """Read until it ends; its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self.read():
            assert time.monotonic() < deadline, self.shown
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown).replace("\r", "")


@pytest.mark.slow
def test_a_run_on_a_terminal(tmp_path):
    out = tmp_path / "run"
    run = Terminal("run", "digits", "--method", "ab", "--workers", 2, "--steps", 60, "--set", "every=5", "--out", out)
    assert run.code() == 0
    for what in ("╭─ ab seed 0, digits on 2 workers", "of fp32 DDP", "steps/s", "samples/s", "finishing: "):
        assert what in run.text, run.text
    assert re.search(r"time \d+ s: computing \d+ %, waiting for the wire \d+ %, the method's own work", run.text)
    summary = json.loads((out / "summary.json").read_text())
    whole = sum(row["seconds"] for row in summary["time"].values())
    assert whole <= sum(summary["spent"].values()) + 0.1  # writing the model comes after the rest
    assert all(seconds >= 0 for seconds in summary["spent"].values()) and summary["spent"]["evaluating"] > 0
    records = [json.loads(text) for text in (out / "records.jsonl").read_text().splitlines()]
    assert records[0]["kind"] == "start" and records[0]["usual_bytes_at_end"] == summary["baseline"]["allreduce_fp32"]
    done = [r["what"] for r in records if r["kind"] == "work" and r["phase"] == "finishing"]
    assert done == ["last average and truncation", "decomposing", "evaluating the finished model", "writing the model"]
    progress = Progress("run")
    for record in records:
        progress.update(record)
    assert progress.share == pytest.approx(summary["traffic_vs_allreduce_fp32"], rel=0.01)


@pytest.mark.slow
def test_ctrl_c_ends_watching_quietly(tmp_path):
    write(tmp_path / "run", start(), taken(1))  # and never ends
    watched = Terminal("watch", tmp_path)
    words = [sys.executable, "-m", "thinwire", "watch", str(tmp_path)]
    piped = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(lambda: watched.read() and "╭─ run, digits on 4 workers" in watched.text, "the panel")
    assert piped.stdout is not None
    said = piped.stdout.readline()
    os.kill(watched.pid, signal.SIGINT)
    piped.send_signal(signal.SIGINT)
    assert watched.code() == 0 and "Traceback" not in watched.text and "Aborted" not in watched.text
    said += piped.communicate(timeout=LIMIT_S)[0]
    assert piped.returncode == 0 and said.startswith("run  groups  step 1/600")
    assert ESCAPE not in said and "Traceback" not in said and "Aborted" not in said
