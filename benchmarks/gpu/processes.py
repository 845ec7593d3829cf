"""Workers of a benchmark, which may not take for ever."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence


def wait_for(workers: Sequence[subprocess.Popen[bytes]], seconds: float, what: str) -> None:
    """Wait until all have ended, and kill those that have not by then, with what they started."""
    end = time.monotonic() + seconds
    try:
        for worker in workers:
            worker.wait(max(1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{what}: not over after {seconds:.0f} s")
    finally:
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
