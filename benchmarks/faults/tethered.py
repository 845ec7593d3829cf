"""End this process when its parent does, whatever ends that: preloaded by the server that forks workers.

That server waits for a pipe to close, of which all workers hold an end, so it would outlive a benchmark that is killed.
"""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def tether() -> None:
    """Let the kernel kill this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


tether()  # here, since a module that is preloaded is only imported
