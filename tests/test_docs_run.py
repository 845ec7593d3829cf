"""Python and commands of the documentation, run with tiny sizes."""

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import gang
import small
from covering import WHOLE
from doc_names import names, runnable
from doc_pages import PAGES, ROOT, Block, blocks, name
from shell_lines import commands, reads, tiny
from test_docs import at_a_users  # noqa: F401  (a fixture)
from thinwire.cli import main

ALONE = ("docs/tuning.md", "docs/small-models.md")
"""Pages whose Python is not of workers, or starts them itself."""


def python_of(page: Path) -> list[list[Block]]:
    """Blocks that run, those that continue others together with them; from a diff, what it leads to."""
    found: list[list[Block]] = []
    for block in blocks(page):
        if block.language == "diff":
            lines = [line[1:] for line in block.code.splitlines() if line[:1] in "+ "]
            found.append([Block(page, block.line, "python", "\n".join(lines), block.mark)])
        elif block.language == "python" and block.mark == "continues":
            found[-1].append(block)
        elif block.language == "python" and not block.mark:
            found.append([block])
    return found


def execute(rank: int, page: str, folder: str) -> None:
    """The blocks of a page, on one of the workers."""
    small.strict()
    os.chdir(folder)
    for together in python_of(ROOT / page):
        given = names(page, rank)
        for block in together:
            exec(compile(runnable(block.code), block.place, "exec"), given)


WITH_PYTHON = [name(page) for page in PAGES if python_of(page)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.rest) if page == "docs/tuning.md" else page for page in WITH_PYTHON]
)
def test_python_runs(page: str, tmp_path: Path) -> None:
    gang.run(execute, 1 if page in ALONE else 2, page, str(tmp_path), fresh=True)


def commands_of(page: Path) -> list[list[str]]:
    """What a reader can run on one machine without root."""
    ours = [
        command.thinwire
        for block in blocks(page)
        if block.language == "sh" and not block.skipped
        for command in commands(block)
        if command.started_by is None and command.thinwire is not None
    ]
    return [words for own in ours if (words := tiny(own)) is not None]


WITH_COMMANDS = [name(page) for page in PAGES if page.parts[-3:-2] != ("benchmarks",) and commands_of(page)]


def with_every_command() -> list[str]:
    """Few pages that have every command between them, or all: a page takes a minute, and `test_docs.py` parses all."""
    kinds = {page: {words[0] for words in commands_of(ROOT / page)} for page in WITH_COMMANDS}
    chosen, missing = [], set().union(*kinds.values())
    while missing:
        chosen.append(max(WITH_COMMANDS, key=lambda page: len(kinds[page] & missing)))
        missing -= kinds[chosen[-1]]
    return WITH_COMMANDS if WHOLE else chosen


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize("page", with_every_command())
@pytest.mark.usefixtures("at_a_users")
def test_commands_run(page: str) -> None:
    shutil.rmtree("runs")  # commands make their own
    tried: set[str] = set()
    for words in commands_of(ROOT / page):
        if words[0] in tried and not WHOLE:
            continue  # such a command takes seconds to start; `test_docs.py` parses all of them
        if not all(path.exists() for path in reads(words)):
            continue  # of a run that the reader has
        tried.add(words[0])
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"thinwire {' '.join(words)}: {done.output}"
