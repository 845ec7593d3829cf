"""The wheel, in an environment that has nothing of the clone but what it depends on."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import needs

ROOT = Path(__file__).parent.parent


def ran(*words: Any, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    try:
        ran(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT, cwd=folder)
    except AssertionError as error:
        if "No matching distribution found for setuptools" in str(error):
            needs.missing("setuptools", "it cannot be downloaded here")
        raise
    (found,) = folder.glob("thinwire-*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel depends on comes from here: to install torch again takes minutes."""
    place = tmp_path_factory.mktemp("empty")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    ran(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    found = ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
    # A path in a .pth file is searched; the .pth files in it, such as that of an editable install, are not read.
    Path(found, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.slow
def test_a_wheel_runs_without_the_clone(python: Path, tmp_path: Path) -> None:
    where = ran(python, "-c", "import thinwire; print(thinwire.__file__)", cwd=tmp_path)
    assert not Path(where.strip()).is_relative_to(ROOT)
    thinwire = python.parent / "thinwire"
    assert ran(thinwire, "--version", cwd=tmp_path) in ran(python, "-m", "thinwire", "--version", cwd=tmp_path)
    said = ["--workers", 2, "--epochs", 1, "--set", "warmup=2", "--set", "every=4", "--out", "run"]
    ran(thinwire, "run", "digits", "--method", "ab", *said, cwd=tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["method"] == "ab"


@pytest.mark.slow
def test_a_wheel_has_data_and_types_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"thinwire/py.typed", "thinwire/datasets/digits8x8.npz"} <= set(names)
    assert all(name.startswith(("thinwire/", "thinwire-")) for name in names)
