"""How to get data that does not come with Thinwire."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path


def how_to_fill(folder: Path | None, addresses: Mapping[str, str]) -> str:
    """The commands that download files into a folder, and what to type then."""
    target = shlex.quote(str(folder)) if folder is not None else "DIR"
    fetch = (f"curl -fL --create-dirs -o {target}/{name} {address}" for name, address in addresses.items())
    return f"To fill the folder: {' && '.join(fetch)}; then give `--data {target}`"
