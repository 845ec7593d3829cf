"""What a test needs beyond what `make setup` installs: one place that decides what happens where it is missing.

On a laptop the test is skipped, and a line at the end of the session names what was not tried. With
THINWIRE_REQUIRE_ALL=1, as in `.ci/run`, it fails. What a machine without a GPU can never have is exempt: see `EXEMPT`.
"""

import importlib
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from browser import binary

EXEMPT = {"torchvision", "timm"}
"""Skipped everywhere they are missing: registries have torchvision, which timm imports, for torch with CUDA alone.

CUDA and nccl are for `make test-gpu`: elsewhere tests compute on the CPU (`machine.py`).
"""
_PREFIX = "not here: "


def required() -> bool:
    """Return whether a part that is missing is an error."""
    return os.environ.get("THINWIRE_REQUIRE_ALL", "0") not in ("", "0")


def missing(part: str, why: str, **how: Any) -> NoReturn:
    """Skip the test, or fail it where everything is required."""
    if required() and part not in EXEMPT:
        pytest.fail(f"{part} is missing, and THINWIRE_REQUIRE_ALL is set: {why}", pytrace=False)
    pytest.skip(f"{_PREFIX}{part}: {why}", **how)


def package(module: str, part: str | None = None) -> Any:
    """Import an optional package; in a module of tests it stands for all of them."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # torchvision raises the second where torch has no CUDA
        missing(part or module, str(error), allow_module_level=True)


def chromium() -> str:
    """Return the path of a Chromium."""
    return binary() or missing("Chromium", "install chromium to see the page in a browser")


def part(name: str, why_not: str | None) -> pytest.MarkDecorator:
    """A mark for what needs a part of the machine; `why_not` is None where the machine has it."""
    return pytest.mark.needs(name, why_not)


def root(why_not: str | None) -> Callable[[Any], Any]:
    """A decorator for what needs root and network namespaces."""
    return lambda test: pytest.mark.root(part("network namespaces", why_not)(test))


def mounted(folder: Path, size: str) -> None:
    """Mount a file system of this size, which needs root."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        missing("mounted disks", done.stderr.strip())


def check(item: pytest.Item) -> None:
    """Skip or fail a test by its marks, before its fixtures are made."""
    for mark in item.iter_markers("needs"):
        name, why_not = mark.args
        if why_not is not None:
            missing(name, why_not)


def not_tried(reports: Iterable[Any]) -> list[str]:
    """Return the parts that were missing, from the reports of tests that were skipped."""
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    told = [reason.partition(_PREFIX)[2] for reason in reasons if _PREFIX in reason]
    return sorted({reason.partition(":")[0] for reason in told})
