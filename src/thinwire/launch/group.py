"""A group of a run with `faults=`: its command is started with its number, and started again when it dies."""

import ctypes
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinwire.base.errors import ThinwireError
from thinwire.elastic.stopping import ENDED, EXIT_CODE, SIGNALS

log = logging.getLogger("thinwire")

_LASTED_S = 60.0
"""A group that lived so long died of something else than the one before."""
_LONGEST_PAUSE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_FINAL = {0: "has finished", EXIT_CODE: "was asked to stop", 2: "was refused"}
"""Exit codes after which it would not help to start again."""


class Group:
    """The command of one group, as long as it takes."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], restarts: int) -> None:
        self.command, self.restarts = list(command), restarts
        self._environment = os.environ | environment
        self._before = _children()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: int | None = None

    def run(self) -> int:
        """Its exit code, in the end."""
        _adopt_orphans()
        before = {number: signal.signal(number, self._pass_on) for number in SIGNALS}
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._ended = Path(folder, "ended")
                self._environment[ENDED] = str(self._ended)
                return self._run()
        finally:
            self._end_what_is_left()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        deaths = 0
        while True:
            began = time.monotonic()
            code = self._once()
            lasted = time.monotonic() - began
            if code in _FINAL or self._asked is not None:
                return code if code >= 0 else 128 - code
            deaths = 1 if lasted > _LASTED_S else deaths + 1
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            if deaths > self.restarts:
                raise ThinwireError(
                    f"the group ended {how} {deaths} times in a row, each time within {_LASTED_S:.0f} s of its start; "
                    "see what it says, and start it again"
                )
            pause = min(_LONGEST_PAUSE_S, 2.0 ** (deaths - 1))
            log.warning("the group ended %s after %.0f s: it is started again in %.0f s", how, lasted, pause)
            end = time.monotonic() + pause
            while time.monotonic() < end and self._asked is None:
                time.sleep(0.05)
            if self._asked is not None:
                return 128 + self._asked

    def _once(self) -> int:
        """Start the command and wait for it; whatever it leaves behind would be in the way of the next."""
        try:
            self._process = subprocess.Popen(self.command, env=self._environment, start_new_session=True)
        except OSError as error:
            raise ThinwireError(f"{self.command[0]!r} cannot be started ({error.strerror})") from None
        if self._asked is not None:  # between two starts
            self._pass_on(self._asked)
        code = self._process.wait()
        self._end_what_is_left()
        return int(self._ended.read_text()) if self._ended.exists() else code

    def _pass_on(self, number: int, _: Any = None) -> None:
        """A signal to this process is one to the group; after a second one nothing is waited for."""
        again, self._asked = self._asked is not None, number
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL if again else number)

    def _end_what_is_left(self) -> None:
        """Also workers whose own launcher is gone: they are this process's children then."""
        while left := _children() - self._before:
            for pid in left:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """Let processes whose parent ends become this one's children, where Linux can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """This process's children, as Linux lists them; elsewhere none are known."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.add(int(stat.parent.name))
    return found
