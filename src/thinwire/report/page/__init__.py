"""`report.html`: one file that holds all it shows. It loads nothing and runs no code but what is in this folder."""

from __future__ import annotations

import html
import json
import os
import re
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.base.files import on_file, refuse_link
from thinwire.report.page.content import Content, collect

NAME = "report.html"
_STYLES = ("uplot.css", "page.css")
_SCRIPTS = ("charts.js", "pareto.js", "curves.js", "bars.js", "layers.js", "timeline.js", "page.js")
_MARK = '<meta name="generator" content="thinwire report">'
_START_BYTES = 2048
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def write_page(content: Content, folder: Path, data: dict[str, Any] | None = None, *, live: str = "") -> Path:
    """Write `report.html` into `folder`; `data` is what `collect` returned, if it has been called already.

    `live` is a `live_part`, for a page that is written again while runs go on.
    """
    path = folder / NAME
    _refuse_other(path)
    data = data or collect(content, folder)
    recipes = [run.summary["recipe"] for run in content.runs] + [bench["recipe"] for bench in content.benches]
    title = ", ".join(dict.fromkeys(recipes)) or folder.resolve().name
    parts = {
        "live": live,
        "title": html.escape(f"{title}: Thinwire report"),
        "sentences": _items(data["sentences"]),
        "problems": _items(data["problems"]),
        "hidden": "" if data["problems"] else "hidden",
        "data": as_json(data),
        "license": html.escape(_file("uplot-license.txt")),
        "uplot": _file("uplot.js"),
        "styles": "\n".join(map(_file, _STYLES)),
        "scripts": "\n".join(map(_file, _SCRIPTS)),
    }
    # In one pass: what is put in is not searched again.
    text = _filled("page.html", parts)
    new = path.with_name(f"{NAME}.new")
    refuse_link(new)
    with on_file(new):
        new.write_text(text, encoding="utf-8")
    os.replace(new, path)
    return path


def live_part(states: Sequence[str], seconds: int) -> str:
    """What a page needs to load itself again every so many seconds, and says about runs that go on."""
    written = time.strftime("%H:%M:%S, %Y-%m-%d")
    return _filled("live.html", {"written": written, "seconds": str(seconds), "states": _items(states)})


def _filled(name: str, parts: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file(name))


def as_json(value: object) -> str:
    """JSON that may stand in a <script>: nothing in it ends the element or a line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Lone surrogates can be in a file's JSON, and not in UTF-8.
    text = text.encode("utf-8", errors="backslashreplace").decode()
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], text)


def _items(texts: Sequence[str]) -> str:
    safe = (html.escape(text.encode("utf-8", errors="backslashreplace").decode()) for text in texts)
    return "".join(f"<li>{text}</li>\n" for text in safe)


def _refuse_other(path: Path) -> None:
    """Replace only a page of our own: people name their own files report.html too."""
    refuse_link(path)
    if not path.exists():
        return
    if path.is_dir():
        raise ConfigError(f"`{path}` is a folder, and the report would be written there; rename it")
    with path.open("rb") as file:
        start = file.read(_START_BYTES)
    if _MARK.encode() not in start:
        raise ConfigError(f"`{path}` was not written by `thinwire report` and is not replaced; rename it")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
