"""Commands of the documentation, taken apart and checked without running them."""

import dataclasses
import itertools
import re
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import click

from doc_pages import ROOT, Block
from thinwire.cli import main
from thinwire.launch.jobs import Job, variants
from thinwire.recipes import named
from thinwire.tuning.objective import parse_objective
from thinwire.tuning.space import chosen_space

PLACEHOLDERS = {
    "METHOD": "ab",
    "gossip": "ab",
    "RECIPE": "digits",
    "FILE.py:FUNCTION": "my_model.py:build",
    "S": "0",
    "N": "100",
}
"""What readers put something of their own in place of."""
_STARTERS = ("sudo", "srun", "mpirun", "torchrun")
_OTHERS = ("export", "nvidia-cuda-mps-control", "wait", "trap", "if", "scontrol")
"""Commands that are not ours, and of which nothing is checked."""
_OURS = {field.name for field in dataclasses.fields(Job)} - {
    *("recipe", "method", "settings", "out", "resume", "model", "hosts"),
}


class Command(NamedTuple):
    """One command."""

    text: str
    words: list[str]
    """From the program on."""
    started_by: str | None
    """What starts it, if not the shell itself."""

    @property
    def thinwire(self) -> list[str] | None:
        """The words after `thinwire`, if it is that."""
        if self.words[:1] == ["thinwire"]:
            return self.words[1:]
        return self.words[3:] if self.words[:3] == ["python", "-m", "thinwire"] else None


def commands(block: Block) -> list[Command]:
    """The commands of a block."""
    text = block.code.replace("\\\n", " ")
    lines = [part for line in text.splitlines() for part in line.split(" && ")]
    return [command for line in lines if (command := parse(line)).words]


def parse(line: str) -> Command:
    """A line, without comments, variables and launchers."""
    words = shlex.split(line, comments=True)
    starter = None
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] in _STARTERS):
        first = words.pop(0)
        starter = starter or first.split("=")[0]
        if first in _STARTERS[1:]:
            words = _after_options(words)
    return Command(line.strip(), words, starter)


def _after_options(words: list[str]) -> list[str]:
    """What a launcher starts."""
    for number, word in enumerate(words):
        if word == "-m":
            return words[number + 1 :]
        if word in ("thinwire", "python"):
            return words[number:]
        if word.endswith(".py"):
            return ["python", *words[number:]]
    raise AssertionError(f"nothing is started by {words}")


def check(command: Command) -> None:
    """Raise if the command would not be understood."""
    ours = command.thinwire
    first = command.words[0]
    if ours is not None:
        check_thinwire([_given(word) for word in ours])
    elif first == "python":
        _check_script(command)
    elif first == "make":
        for target in command.words[1:]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    elif first == "pip":
        _check_extras(command.text)
    else:
        assert first in _OTHERS, f"{command.text!r}: mark the block with <!-- test: skip REASON -->, or check it here"


def _given(word: str) -> str:
    """What a reader would write there."""
    return "runs/tune-digits-ab/best.json" if word.endswith("/best.json") else PLACEHOLDERS.get(word, word)


def check_thinwire(words: list[str]) -> None:
    """Options, their values, the recipe, the methods and their settings."""
    if not words:
        return
    name, *rest = words
    for folder in (word for word in rest if re.fullmatch(r"[A-Z_]+|runs/[\w-]+", word)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        given = main.commands[name].make_context(name, rest).params
    except click.exceptions.Exit:  # --help
        return
    methods = given.get("method") or given.get("methods")
    if given.get("recipe") is None:
        return
    recipe = named(given["recipe"], arguments=given.get("arguments", ()))
    if given.get("objective"):
        parse_objective(given["objective"], recipe.task.metric)
    if given.get("space"):
        chosen_space(given["space"], methods.partition(":")[0], 1000)
    if methods is None:
        return
    same = {key: value for key, value in given.items() if key in _OURS and value is not None}
    for own in variants(methods, given.get("settings", ()), recipe.scheduled):
        job = Job(recipe=given["recipe"], method=own.method, settings=own.settings, out=Path("runs/none"), **same)
        job.check(data=False)


def _check_script(command: Command) -> None:
    script = Path(command.words[1])
    if script.parent == Path():  # the reader's own, such as train.py
        return
    assert (ROOT / script).is_file(), f"{command.text!r}: there is no {script}"
    folders = (ROOT / script).parent, ROOT / "benchmarks"
    sources = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.glob("*.py"))
    for option in re.findall(r"(?<= --)[\w-]+", " ".join(command.words)):
        written = rf'"(--)?{option}"|\b{option.replace("-", "_")}='
        assert re.search(written, sources), f"{command.text!r}: {script} has no --{option}"


def _check_extras(text: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"(?:thinwire|\W\.)\[([\w,]+)\]", text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), text


_SIZES: dict[str, list[str]] = {
    "run": ["--steps", "120", "--workers", "2", "--overwrite"],
    "compare": ["--steps", "120", "--workers", "2", "--seeds", "1", "--overwrite"],
    "plan": ["--steps", "120", "--compute", "20ms"],
    **{name: [] for name in ("list", "runs", "report", "export", "doctor")},
}


def tiny(words: list[str]) -> list[str] | None:
    """The same command over a few steps of two workers, if it needs no data and no file of the reader's."""
    theirs = any(":" in word and ".py" in word for word in words)
    if words[0] not in _SIZES or theirs or {"--data", "--config", "shakespeare"} & {*words}:
        return None
    if words[0] in ("run", "compare") and "--group-size" in words:
        first = words.index("--group-size")
        words = words[:first] + words[first + 2 :]
    return words if "--help" in words else [*words, *_SIZES[words[0]]]


def reads(words: list[str]) -> list[Path]:
    """Runs that the command begins with; what it writes comes after --out."""
    named = [word for before, word in itertools.pairwise(words) if word.startswith("runs/") and before != "--out"]
    return [Path(word) for word in named]
