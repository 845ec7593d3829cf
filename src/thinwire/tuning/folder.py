"""The folder of a search: nothing is deleted that is not its own."""

from __future__ import annotations

from pathlib import Path

from thinwire.train.run_folder import clear
from thinwire.tuning.crew import ERRORS, LOG
from thinwire.tuning.trial import FILE as TRIAL


def remove(trial: Path) -> None:
    """Delete what a trial wrote into its folder, and nothing else."""
    clear(trial)
    for path in (*(trial / ERRORS).glob("*.json"), trial / LOG, trial / TRIAL):
        path.unlink(missing_ok=True)
    for folder in (trial / ERRORS, trial):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
