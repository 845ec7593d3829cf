"""`thinwire report --live`: a page that is kept up to date while runs go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from thinwire.base.errors import printable
from thinwire.commands.doing import Doing
from thinwire.report.live import FINISHED, Followed, FollowedRun, in_words, so_far
from thinwire.report.page import live_part, write_page
from thinwire.report.page.content import Content
from thinwire.report.runs import Run, baseline_first, look, run_folders

RELOAD_S = 5
_LOOK_S = 1.0
_SHARE = 0.1
"""Of the time that may be spent on writing pages."""


def keep_up(folders: Sequence[Path], place: Path, *, quiet: bool) -> list[Run]:
    """Write the page again and again until all runs have ended, or Ctrl-C; then those that were still under way."""
    followed = Followed(folders, find=run_folders)
    due, seen = 0.0, None
    try:
        with Doing(Console(stderr=True), quiet=quiet) as doing:
            while not followed.is_over(runs := followed.refresh()):
                now = time.monotonic()
                state = [(run.folder, run.written, run.end) for run in runs]
                if now >= due and state != seen:
                    path = _write(runs, place)
                    seen, due = state, now + max(RELOAD_S, (time.monotonic() - now) / _SHARE)
                    doing.update(f"keeping {path} up to date until all runs have ended, or Ctrl-C")
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass
    return _under_way(followed.refresh())


def _write(runs: list[FollowedRun], place: Path) -> Path:
    found = [look(run.folder) for run in runs if run.end == FINISHED]
    finished = [each.run for each in found if each.run]
    states = [in_words(run) for run in runs if run.end is None]
    states += [f"{run.progress.title}: {run.end}" for run in runs if run.end not in (None, FINISHED)]
    problems = [printable(f"{each.folder.name}: {each.note}") for each in found if not each.run]
    shown = sorted([*finished, *_under_way(runs)], key=baseline_first)
    return write_page(Content(shown, problems), place, live=live_part(states or ["no run yet"], RELOAD_S))


def _under_way(runs: list[FollowedRun]) -> list[Run]:
    return [known for run in runs if run.end != FINISHED and (known := so_far(run))]
