"""A part that is missing: a skip and a line at the end, or a failure where everything is required."""

import subprocess
import sys
from pathlib import Path

import pytest

import needs

TESTS = """
import needs

def test_a_package():
    needs.package("no_such_package", "Nothing")

def test_an_exempt_one():
    needs.missing("timm", "it is not here")

@needs.part("Things", "there are none")
def test_a_part():
    raise AssertionError

@needs.part("Other things", None)
def test_a_part_that_is_there():
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("required", ["1", "0"])
def test_what_is_missing_is_named_or_fails(required: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    (tmp_path / "test_parts.py").write_text(TESTS)
    monkeypatch.setenv("THINWIRE_REQUIRE_ALL", required)
    monkeypatch.setenv("PYTHONPATH", str(here))
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", str(here.parent / "pyproject.toml")]
    done = subprocess.run([*words, "--rootdir", str(tmp_path), str(tmp_path)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if required == "1":
        assert "1 failed, 1 passed, 1 skipped, 1 error" in lines[-1] and "not tried here: timm" in lines, done.stdout
        assert "Nothing is missing, and THINWIRE_REQUIRE_ALL is set: No module named 'no_such_package'" in lines
    else:
        assert "1 passed, 3 skipped" in lines[-1] and "not tried here: Nothing, Things, timm" in lines, done.stdout


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("THINWIRE_REQUIRE_ALL", value)
        assert needs.required() == wanted
