"""The documentation: links lead somewhere, commands have the options that they show, Python compiles."""

import re
import tomllib
from pathlib import Path

import click
import pytest

from doc_pages import PAGES, ROOT, anchors, blocks, links, name, prose, spans
from shell_lines import Command, check, commands, parse
from thinwire.tuning.space import space_of

LANGUAGES = {"sh", "python", "diff", "toml", "ini", "text", "layers"}
WORDS = 450
"""Of the README, at most: it is read by people in a hurry."""
each_page = pytest.mark.parametrize("page", PAGES, ids=name)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if ":" in path:  # elsewhere
            continue
        assert target.is_file(), f"{name(page)}: {link} leads to no file"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {link} leads to no heading"


@each_page
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: name its language, one of {', '.join(sorted(LANGUAGES))}"


@pytest.fixture
def at_a_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that commands of the documentation name."""
    for folder in ("benchmarks", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "my_model.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(8, 8)\n")
    (own,) = [b for b in blocks(ROOT / "docs" / "recipes.md") if b.language == "python"]
    (tmp_path / "my.py").write_text(own.code)
    found = tmp_path / "runs" / "tune-digits-ab" / "best.json"
    found.parent.mkdir(parents=True)
    found.write_text('{"recipe": "digits", "method": "ab"}')
    monkeypatch.chdir(tmp_path)


@each_page
@pytest.mark.usefixtures("at_a_users")
def test_commands_are_understood(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh" and not block.skipped:
            for command in commands(block):
                _check(command, block.place)
    for span in spans(page):
        if re.match(r"(thinwire|python|make) \S+", span) and not re.search(r"[…|]|\bFILE$", span):
            _check(parse(span), name(page), whole=False)


def _check(command: Command, place: str, *, whole: bool = True) -> None:
    try:
        check(command)
    except (click.MissingParameter, click.BadOptionUsage):
        assert not whole, f"{place}: {command.text!r} lacks an argument"
    except Exception as error:
        raise AssertionError(f"{place}: {command.text!r} is not understood: {error}") from error


@each_page
def test_python_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python" and not block.mark.startswith("part of"):
            compile(block.code.replace("…", "..."), block.place, "exec")


@each_page
def test_parts_of_files_are_in_them(page: Path) -> None:
    for block in blocks(page):
        if block.mark.startswith("part of "):
            source = (ROOT / block.mark.removeprefix("part of ")).read_text(encoding="utf-8")
            for paragraph in block.code.strip().split("\n\n"):
                assert paragraph in source, f"{block.place}: not in the file any more:\n{paragraph}"


@each_page
def test_toml_is_read(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            found = tomllib.loads(block.code)
            if "project" not in found:
                space_of(found, block.place)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(map(name, PAGES))


def test_every_public_name_is_in_the_reference() -> None:
    import thinwire

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^<!-- api: thinwire\.(\w+) -->$", text, re.MULTILINE)) == set(thinwire.__all__)


def test_the_readme_is_short() -> None:
    assert len(prose(ROOT / "README.md").split()) <= WORDS
