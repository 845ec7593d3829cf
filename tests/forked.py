"""Processes of pytest-xdist, forked from the server that workers are forked from.

Each would load torch and all else for itself, and so would a server of its own: ten seconds of a core for each.
"""

import os
import sys
from multiprocessing import forkserver, resource_tracker
from typing import Any

from execnet import gateway_base, gateway_io

import gang

# What collecting the tests imports beside what workers need, and what several files of tests do.
_LOADED = (
    "accelerate.utils",
    "transformers.utils",
    "transformers.trainer_callback",
    "pytorch_optimizer",
    "matplotlib.figure",
)


def fork_from_one_server() -> None:
    """For the process that hands out tests: what execnet starts from now on is forked."""
    create = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        return _Forked(execmodel) if spec.popen and not spec.python else create(spec, execmodel)

    gateway_io.create_io = create_io
    gang.context.set_forkserver_preload([*gang.LOADED, *_LOADED])
    errors, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # for whatever it forks; gang.SAID is where tests see what theirs say
    forkserver.ensure_running()  # it loads while pytest makes itself ready
    os.dup2(errors, 2)
    os.close(errors)
    os.close(nowhere)


class _Forked(gateway_base.Popen2IO):
    """What execnet asks of a process that it has started."""

    def __init__(self, execmodel: Any) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        files = gang.Files({0: theirs_in, 1: theirs_out, 2: 2})
        self.process = gang.context.Process(target=_serve, args=(files,))
        self.process.start()
        os.close(theirs_in)
        os.close(theirs_out)
        super().__init__(os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb"), execmodel)
        self.wait, self.kill = self.process.join, self.process.kill


def _serve(files: gang.Files) -> None:
    """Do as `python -c` does with the line that execnet sends."""
    files.take()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    # multiprocessing takes a server for its own child, and would start another one.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
