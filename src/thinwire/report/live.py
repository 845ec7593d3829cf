"""Show what goes on while it goes on: in place on a terminal, in a line now and then elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

from thinwire.report.followed import FollowedRun
from thinwire.report.panel import line

EVERY_S = 1.0
_OFTEN_S, _SELDOM_S, _LINES_SO_FAR = 5.0, 60.0, 10
"""A log gets a line every 5 s at first, and every minute of a long run."""


def in_place(console: Console) -> bool:
    """Whether lines can be rewritten: also variables that force colours into a file make a console a terminal."""
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


@contextmanager
def repeated(show: Callable[[], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Call `show` again and again in a thread, and once more at the end."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(every_s):
            show()
        show()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def rewritten(draw: Callable[[], RenderableType], console: Console) -> Iterator[None]:
    """Draw in place, again and again; nothing of it stays."""
    with (
        Live(draw(), console=console, auto_refresh=False, transient=True) as live,
        repeated(lambda: live.update(draw(), refresh=True)),
    ):
        yield


@contextmanager
def following(run: FollowedRun, console: Console) -> Iterator[None]:
    """Show a run: its panel on a terminal, lines elsewhere."""
    if in_place(console):

        def draw() -> RenderableType:
            run.refresh()
            return run.panel(console.width)

        with rewritten(draw, console):
            yield
    else:
        lines = Lines(run, console)
        with repeated(lines.show):
            yield


class Lines:
    """Says how far a run is when its phase changes, and otherwise in intervals that grow with the run."""

    def __init__(self, run: FollowedRun, console: Console) -> None:
        self._run, self._console = run, console
        self._began = self._last = time.monotonic()
        self._said: tuple[str, int | None] = ("", None)

    def show(self) -> None:
        """Print a line if one is due and there is something new."""
        self._run.refresh()
        progress, now = self._run.progress, time.monotonic()
        news = (progress.phase, progress.step)
        interval = min(_SELDOM_S, max(_OFTEN_S, (now - self._began) / _LINES_SO_FAR))
        due = news[0] != self._said[0] or now - self._last >= interval
        if progress.step is not None and news != self._said and due:
            self._said, self._last = news, now
            self._console.print(line(progress), highlight=False, soft_wrap=True, markup=False)
