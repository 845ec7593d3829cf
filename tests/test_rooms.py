"""The order of layers: a file imports only from those before its own."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.methods.registry import METHODS

PACKAGE = Path(__file__).parent.parent / "src" / "thinwire"
ORDER = [
    *(
        "errors",
        "files",
        "units",
        "checks",
        "config",
        "settings",
        "factor",
        "comm",
        "store",
        "methods",
        "compiling",
        "admission",
        "snapshot",
    ),
    *(
        "stepping",
        "guards",
        "notices",
        "replica",
        "ema",
        "train",
        "recipes",
        "report",
        "squeeze",
        "plan",
        "tune",
        "launch",
        "jobs",
        "netbench",
        "commands",
        "cli",
        "experiments",  # so that nothing else may import it
    ),
]
DOORS = ("__init__", "__main__")  # the package's own entry points may import every layer
SOURCES = sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of everything imported, relative imports resolved."""
    package = ("thinwire", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*parents, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _rooms_used(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("thinwire.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_come_from_above(path):
    room = _room(path)
    if room in DOORS:
        return
    assert room in ORDER, f"{path.name} is in no layer; put it into ORDER or into a folder"
    allowed = set(ORDER[: ORDER.index(room) + 1])
    assert _rooms_used(path) <= allowed, f"{room} may import from {sorted(allowed)} only"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_experiments_stand_on_training_alone_and_nothing_on_them(path):
    if _room(path) == "experiments":
        assert _rooms_used(path) <= {"errors", "comm", "train", "recipes", "experiments"}
    else:
        assert "experiments" not in _rooms_used(path)


@pytest.mark.parametrize("path", [p for p in SOURCES if _room(p) == "report"], ids=lambda p: p.name)
def test_report_imports_nothing_of_training(path):
    assert _rooms_used(path) <= {"errors", "files", "report"}
    assert not any(name.split(".")[0] == "torch" for name in _imports(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_comm_calls_torch_distributed(path):
    if _room(path) == "comm":
        return
    assert not any(name.startswith("torch.distributed") for name in _imports(path))
    attributes = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute))
    assert "torch.distributed" not in {ast.unparse(node) for node in attributes}


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if _room(p) in ("train", "launch", "jobs", "cli")],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_training_and_command_line_name_no_method(path):
    names = set(METHODS) | {entry.config.__name__ for entry in METHODS.values()}
    found = set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) & names
    assert not found


def test_the_rules_bite(tmp_path, monkeypatch):
    (tmp_path / "factor").mkdir()
    bad = tmp_path / "factor" / "layers.py"
    bad.write_text("from thinwire import comm\nfrom ..train.loop import fit\nimport torch.distributed as dist\n")
    monkeypatch.setattr("test_rooms.PACKAGE", tmp_path)
    with pytest.raises(AssertionError, match="factor may import"):
        test_imports_come_from_above(bad)
    with pytest.raises(AssertionError):
        test_only_comm_calls_torch_distributed(bad)
    bad.write_text("from thinwire.experiments.models import ViT\n")
    with pytest.raises(AssertionError):
        test_experiments_stand_on_training_alone_and_nothing_on_them(bad)
