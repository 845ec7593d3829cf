"""One thing that a study compares, and where studies keep theirs."""

import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

STUDIES = Path(__file__).resolve().parents[1]


class Setting(NamedTuple):
    """A method with its fields, on a recipe."""

    name: str
    method: str
    fields: tuple[str, ...]
    recipe: str
    workers: int = 4
    epochs: int | None = None
    """None leaves the recipe's, as it does for `eval_every`."""
    eval_every: int | None = None
    keeps_model: bool = False
    options: tuple[str, ...] = ()
    """Further words for `thinwire run`, such as ("--lr", "2e-3")."""


def by(setting: Setting, workers: int) -> Setting:
    """The same by so many workers."""
    return setting._replace(name=f"{setting.name}-{workers}workers", workers=workers)


def sets_of(study: str) -> dict[str, list[Setting]]:
    """SETS in the settings.py of a study's folder; by its path, since all have the same name."""
    path = STUDIES / study / "settings.py"
    spec = importlib.util.spec_from_file_location(f"settings_of_{study}", path)
    if spec is None or spec.loader is None or not path.is_file():
        known = sorted(path.parent.name for path in STUDIES.glob("*/settings.py"))
        sys.exit(f"there is no study {study}, choose from: {', '.join(known)}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SETS
