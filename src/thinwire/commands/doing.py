"""What a command is doing while it has nothing to show yet."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.text import Text

from thinwire.report.live import in_place


class Doing:
    """One changing line on a terminal, single lines on stderr elsewhere."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._status = console.status("") if in_place(console) and not quiet else None
        self._said = ""

    def __enter__(self) -> Doing:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, what: str, done: int = 0, of: int = 0) -> None:
        """Show what is being done, and how far it is; how far it is does not make a new line."""
        if self._status is not None:
            self._status.update(Text(f"{what}{f', {done + 1} of {of}' if of else ''} …"))
        elif not self._quiet and what != self._said:
            click.echo(f"{what} …", err=True)
        self._said = what
