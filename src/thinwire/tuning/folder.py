"""The folder of a search: one search at a time, and nothing is deleted that is not its own."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.train.folder import clear
from thinwire.tuning.crew import ERRORS, LOG
from thinwire.tuning.trial import FILE as TRIAL


def hold(folder: Path) -> int | None:
    """Lock it until the returned descriptor is closed, or this process ends; None where locks do not work."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ConfigError(f"another search runs in `{folder}`; wait for its end, or give another `--out`") from None
    except OSError:  # a file system without locks
        os.close(held)
        return None
    return held


def remove(trial: Path) -> None:
    """Delete what a trial wrote into its folder, and nothing else."""
    clear(trial)
    for path in (*(trial / ERRORS).glob("*.json"), trial / LOG, trial / TRIAL):
        path.unlink(missing_ok=True)
    for folder in (trial / ERRORS, trial):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
