"""The README's table of methods says what `thinwire plan` and `thinwire doctor` would say in these situations."""

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

from doc_pages import ROOT, blocks, prose
from thinwire.cli import main
from thinwire.methods.registry import METHODS

RESULTS = ROOT / "docs" / "results.md"
NAMES = {entry.config.__name__: name for name, entry in METHODS.items()}
KEEPING_SHAPE = ["localsgd", "daso", "powersgd"]
"""Others of which a model keeps its shape."""


def label(expression: str) -> str:
    """A config as the command line writes it; what the README leaves out is in docs/which-method.md."""
    method, fields = re.fullmatch(r"(?:thinwire\.)?(\w+)\((.*)\)", expression, re.DOTALL).groups()
    given = [f"{field}={value}" for field, value in re.findall(r'(\w+)="?([\w:.]+)"?', fields) if value != "…"]
    return ":".join([NAMES[method], *(text for text in given if not text.startswith(("total_steps", "outer")))])


def table() -> dict[str, str]:
    """Situations and labels."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| \[`(\w+\(.*?\))`\]\(docs/methods/\w+\.md\) \|", text, re.MULTILINE)
    return {situation: label(expression) for situation, expression in rows}


def full_diloco() -> str:
    (block,) = [b for b in blocks(ROOT / "docs" / "which-method.md") if b.language == "python"]
    return label(block.code.replace("thinwire.Nesterov(1.0, 0.5)", "1.0/0.5").strip())


def plan(methods: list[str], rate: str) -> dict[str, Any]:
    words = ["plan", "digits", "--workers", "4", "--nodes", "4", "--bandwidth", rate, "--compute", "40ms"]
    done = CliRunner().invoke(main, [*words, "--steps", "240", "--json", "--methods", ",".join(methods)])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_readme_has_four_situations_and_known_methods() -> None:
    assert list(table().values()) == ["allreduce", "allreduce:wire=int8", "ab", "diloco:every=24:wire=int2"]
    assert full_diloco().startswith("diloco:every=24:wire=int2:")


@pytest.mark.slow
def test_a_plan_agrees_on_fast_links() -> None:
    advice = plan([*table().values()], "100Gbit")["recommendation"]
    assert advice["best"] == advice["baseline"]
    assert advice["best"]["method"] == "allreduce"


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["50Mbit", "100Mbit"])
def test_a_plan_agrees_on_slow_links(rate: str) -> None:
    _, exact, smaller, _ = table().values()
    same_shape = full_diloco()
    found = plan(["allreduce", exact, smaller, same_shape, *KEEPING_SHAPE], rate)
    speedups = {row["method"]: row["speedup"] for row in found["methods"]}
    assert found["recommendation"]["best"]["method"] == smaller
    assert found["recommendation"]["closest"]["method"] == exact
    assert max(speedups.keys() - {smaller}, key=lambda method: speedups[method]) == same_shape


@pytest.mark.parametrize("page", ["README.md", "docs/which-method.md"])
def test_figures_are_those_of_the_benchmarks(page: str) -> None:
    """Differences with their spread, and one part in so many, stand in the pages that measured them."""
    measured = "\n".join(path.read_text(encoding="utf-8") for path in [*(ROOT / "benchmarks").rglob("*.md"), RESULTS])
    text = prose(ROOT / page)
    spreads = re.findall(r"[−+]?\d+\.\d+ ± \d+\.\d+", text)
    assert spreads, "no figures with a spread"
    assert [spread for spread in spreads if spread.lstrip("+") not in measured] == []
    for part in re.findall(r"\b1/(\d+(?:\.\d+)?)", text):
        share = 1 / float(part)
        forms = [rf"\b{part} times", rf"\b{part} : 1", rf"\b{share:.4f}", rf"\b{share:.3f}", rf"\b{part}0? : 1"]
        assert any(re.search(form, measured) for form in forms), f"1/{part} is in no benchmark"
