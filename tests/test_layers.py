"""The layers of the package, as CONTRIBUTING.md draws them: a module imports only from modules before it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "thinwire"
DIAGRAM = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```layers\n")[1].split("```")[0]
ORDER = [module for line in DIAGRAM.splitlines() for module in line.partition("|")[0].split()]
ENTRY_POINTS = ("__init__", "__main__")  # may import every layer
SOURCES = sorted(PACKAGE.rglob("*.py"))


def _layer(path: Path) -> str:
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


def _layers_used(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("thinwire.")}


def test_the_diagram_has_every_layer_once():
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) == {_layer(path) for path in SOURCES} - set(ENTRY_POINTS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_come_from_earlier_layers(path):
    layer = _layer(path)
    if layer in ENTRY_POINTS:
        return
    assert layer in ORDER, f"{path.name} is in no layer; add it to the diagram in CONTRIBUTING.md"
    allowed = set(ORDER[: ORDER.index(layer) + 1])
    assert _layers_used(path) <= allowed, f"{layer} may import from {sorted(allowed)} only"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_experiments_stand_on_training_alone_and_nothing_on_them(path):
    if _layer(path) == "experiments":
        assert _layers_used(path) <= {"errors", "files", "config", "comm", "train", "recipes", "experiments"}
    else:
        assert "experiments" not in _layers_used(path)


@pytest.mark.parametrize("path", [p for p in SOURCES if _layer(p) == "report"], ids=lambda p: p.name)
def test_report_imports_nothing_of_training(path):
    assert _layers_used(path) <= {"errors", "schema", "files", "units", "report"}
    assert not any(name.split(".")[0] == "torch" for name in _imports(path))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_comm_calls_torch_distributed(path):
    if _layer(path) == "comm":
        return
    assert not any(name.startswith("torch.distributed") for name in _imports(path))
    attributes = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute))
    assert "torch.distributed" not in {ast.unparse(node) for node in attributes}


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if _layer(p) in ("train", "failures", "launch", "jobs", "cli")],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_training_and_command_line_name_no_method(path):
    names = set(METHODS) | {entry.config.__name__ for entry in METHODS.values()}
    found = set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) & names
    assert not found


def test_violations_are_caught(tmp_path, monkeypatch):
    (tmp_path / "factor").mkdir()
    bad = tmp_path / "factor" / "layers.py"
    bad.write_text("from thinwire import comm\nfrom ..train.loop import fit\nimport torch.distributed as dist\n")
    monkeypatch.setattr("test_layers.PACKAGE", tmp_path)
    with pytest.raises(AssertionError, match="factor may import"):
        test_imports_come_from_earlier_layers(bad)
    with pytest.raises(AssertionError):
        test_only_comm_calls_torch_distributed(bad)
    bad.write_text("from thinwire.experiments.models import ViT\n")
    with pytest.raises(AssertionError):
        test_experiments_stand_on_training_alone_and_nothing_on_them(bad)
