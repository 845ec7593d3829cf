"""The layers of the package, as CONTRIBUTING.md draws them: a module imports only from modules before it."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from thinwire import extend
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


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Dotted names of everything imported, relative imports resolved."""
    return frozenset(_all_imports(path))


def _all_imports(path: Path) -> Iterator[str]:
    package = ("thinwire", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*parents, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _layers_used(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("thinwire.")}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _wrong(rule: Callable[[Path], str | None], sources: Iterable[Path] = SOURCES) -> dict[str, str]:
    """Which files break a rule, and how."""
    return {str(path): found for path in sources if (found := rule(path))}


def _from_later(path: Path) -> str | None:
    layer = _layer(path)
    if layer in ENTRY_POINTS:
        return None
    if layer not in ORDER:
        return "is in no layer; add it to the diagram in CONTRIBUTING.md"
    later = _layers_used(path) - set(ORDER[: ORDER.index(layer) + 1])
    return f"{layer} may not import from {sorted(later)}" if later else None


def _of_experiments(path: Path) -> str | None:
    if _layer(path) != "experiments":
        return "imports from experiments" if "experiments" in _layers_used(path) else None
    more = _layers_used(path) - {"base", "config", "comm", "train", "recipes", "experiments"}
    return f"imports from {sorted(more)}" if more else None


def _of_training(path: Path) -> str | None:
    more = _layers_used(path) - {"base", "report"}
    more |= {name for name in _imports(path) if name.split(".")[0] == "torch"}
    return f"imports from {sorted(more)}" if more else None


def _calls_torch_distributed(path: Path) -> str | None:
    if _layer(path) == "comm":
        return None
    if "distributed" not in path.read_text(encoding="utf-8"):
        return None
    imported = any(name.startswith("torch.distributed") for name in _imports(path))
    attributes = (n for n in ast.walk(_tree(path)) if isinstance(n, ast.Attribute) and n.attr == "distributed")
    used = any(isinstance(n.value, ast.Name) and n.value.id == "torch" for n in attributes)
    return "uses torch.distributed" if imported or used else None


def _names_a_method(path: Path) -> str | None:
    names = set(METHODS) | {entry.config.__name__ for entry in METHODS.values()}
    found = set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) & names
    return f"names {sorted(found)}" if found else None


def _of(*layers: str) -> list[Path]:
    return [path for path in SOURCES if _layer(path) in layers]


def test_the_diagram_has_every_layer_once() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) == {_layer(path) for path in SOURCES} - set(ENTRY_POINTS)


def test_imports_come_from_earlier_layers() -> None:
    assert not _wrong(_from_later)


def test_experiments_stand_on_training_alone_and_nothing_on_them() -> None:
    assert not _wrong(_of_experiments)


def test_report_imports_nothing_of_training() -> None:
    assert not _wrong(_of_training, _of("report"))


def test_only_comm_calls_torch_distributed() -> None:
    assert not _wrong(_calls_torch_distributed)


def test_training_and_command_line_name_no_method() -> None:
    assert not _wrong(_names_a_method, _of("train", "failures", "launch", "jobs", "cli"))


def test_violations_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factor").mkdir()
    bad = tmp_path / "factor" / "layers.py"
    bad.write_text("from thinwire import comm\nfrom ..train.loop import fit\nimport torch.distributed as dist\n")
    monkeypatch.setattr("test_layers.PACKAGE", tmp_path)
    assert _wrong(_from_later, [bad]) == {str(bad): "factor may not import from ['comm', 'train']"}
    assert _wrong(_calls_torch_distributed, [bad])
    worse = bad.with_name("ranks.py")
    worse.write_text("from thinwire.experiments.models import ViT\n")
    assert _wrong(_of_experiments, [worse])


def test_contracts_are_small_and_methods_short() -> None:
    """What a method of one's own has to know: at most ten members of an exchange, eight of a shape or a rule."""
    for contract, most in ((extend.Exchange, 10), (extend.Shape, 8), (extend.UpdateRule, 8)):
        members = [name for name in dir(contract) if not name.startswith("_") and callable(getattr(contract, name))]
        assert len(members) <= most, members
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in _of("methods")}
    ours = [entry.config.__module__ for entry in METHODS.values() if entry.config.__module__.startswith("thinwire.")]
    methods = {module.rpartition(".")[2] + ".py" for module in ours}
    assert len(methods) == 10 and all(lengths[name] < 250 for name in methods)
