"""A plugin for coverage.py: which file of tests a line was executed for, in whatever process."""

import os
from types import FrameType
from typing import Any

import coverage

# A worker's case, and whatever another process is started for.
_BEGINS = {"_outcome", "_called", "pytest_pyfunc_call", "pytest_fixture_setup", "<module>"}


class ByFile(coverage.CoveragePlugin):
    """The context is the file of the test that is running."""

    def dynamic_context(self, frame: FrameType) -> str | None:
        """Called at each call outside of a context; the context ends when that call returns."""
        if frame.f_code.co_name not in _BEGINS:
            return None
        return os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0] or None


def coverage_init(registry: Any, options: Any) -> None:
    """What coverage.py calls."""
    registry.add_dynamic_context(ByFile())
