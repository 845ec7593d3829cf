"""The pages of the documentation: their links, their headings and their blocks of code.

A comment before a block says what tests do with it, and no reader sees it:

- `<!-- test: skip REASON -->`: nothing; the reason names what it needs, such as a cluster;
- `<!-- test: continues -->`: it goes on from the block before it;
- `<!-- test: part of FILE -->`: it shows lines of that file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
MARK = re.compile(r"<!-- test: (skip .+|continues|part of .+) -->")
_FENCE = re.compile(r"( *)```(\w*)$")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`]+`")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    code: str
    mark: str = ""

    @property
    def skipped(self) -> bool:
        return self.mark.startswith("skip ")

    @property
    def place(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    """As a test's id."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All blocks of code, in order."""
    found: list[Block] = []
    mark, start, lines = "", None, []
    for number, line in enumerate(_lines(page), 1):
        fence = _FENCE.match(line)
        if fence and start is None:
            start, indent, language, lines = number, len(fence[1]), fence[2], []
        elif fence and start is not None:
            found.append(Block(page, start, language, "\n".join(lines) + "\n", mark))
            mark, start = "", None
        elif start is not None:
            lines.append(line[indent:])
        elif line.startswith("<!-- test:"):
            known = MARK.fullmatch(line)
            assert known, f"{name(page)}:{number}: {line} is no mark that tests know"
            mark = known[1]
        elif line:
            assert not mark, f"{name(page)}:{number}: a mark stands before something that is no block of code"
    assert start is None, f"{name(page)}:{start}: a block of code does not end"
    return found


def prose(page: Path) -> str:
    """All but blocks of code."""
    inside, kept = False, []
    for line in _lines(page):
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    """Where links and pictures lead."""
    return _LINK.findall(_CODE.sub("", prose(page)))


def anchors(page: Path) -> set[str]:
    """The headings as links name them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(page: Path) -> list[str]:
    """Code inside of sentences."""
    return [span.strip("`") for span in _CODE.findall(prose(page))]


def _lines(page: Path) -> list[str]:
    return page.read_text(encoding="utf-8").splitlines()
