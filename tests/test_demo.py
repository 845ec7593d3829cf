"""`thinwire demo`, and comparisons over links that are made on this machine."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import needs
from thinwire.base.errors import ConfigError
from thinwire.base.units import bits_per_second
from thinwire.cli import main
from thinwire.commands import demo
from thinwire.launch.jobs import Job, variants
from thinwire.netbench import hosts
from thinwire.netbench.hosts import nodes_for

SOURCES = Path(__file__).parents[1] / "src"


@pytest.mark.parametrize(("workers", "group_size", "nodes"), [(2, None, 2), (4, None, 4), (4, "2", 2), (6, "2", 3)])
def test_a_group_is_a_node(workers: int, group_size: str | None, nodes: int) -> None:
    assert nodes_for(workers, group_size) == nodes


@pytest.mark.parametrize(("workers", "group_size"), [(1, None), (2, "2"), (4, "3"), (4, "world"), (4, "0")])
def test_one_node_has_no_link(workers: int, group_size: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"`--link` is between nodes, and {workers} workers .*use `--workers 4"):
        nodes_for(workers, group_size)


def test_a_rate_that_is_none_is_refused_before_any_work(tmp_path: Path) -> None:
    words = ["compare", "digits", "--methods", "allreduce", "--link", "fast", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "'fast' is not a valid rate" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"), [("--steps=13", "13 is not in the range x>=14"), ("--link=fast", "a valid")]
)
def test_the_demo_refuses_what_cannot_work_before_it_says_anything(tmp_path: Path, given: str, said: str) -> None:
    result = CliRunner().invoke(main, ["demo", given, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and said in result.output and "A small CNN" not in result.output


def test_the_least_steps_of_the_demo_are_enough_for_all_its_methods(tmp_path: Path) -> None:
    base = Job(recipe=demo._RECIPE, method="", out=tmp_path, workers=2, steps=demo._LEAST_STEPS)
    for variant in variants(demo._METHODS, ()):
        assert base.of(variant).config


@pytest.mark.slow
@needs.root(hosts.why_not())
def test_a_comparison_over_slow_links_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    words = ["--methods", "allreduce,localsgd", "--steps", "30", "--link", "50Mbit", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, ["compare", "digits", *words])
    assert result.exit_code == 0, result.output
    assert "links of 50 Mbit/s" in " ".join(result.output.split())
    plain, apart = (
        json.loads((tmp_path / f"{name}-seed0/summary.json").read_text()) for name in ("allreduce", "localsgd")
    )
    for summary in (plain, apart):
        assert bits_per_second(summary["link"]) == 50e6
        assert summary["nodes"] == [[0], [1]]
    # What the link carries takes its time: 27 MB, at most 6.25 MB in a second.
    assert plain["wall_s"] > plain["traffic"]["slow_bytes"] / 6.25e6
    assert plain["traffic"]["by_phase"]["train"]["kernel_bytes"] > plain["traffic"]["slow_bytes"] * 0.99


@pytest.mark.rest
@pytest.mark.slow
def test_without_root_the_demo_plans_for_real_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setattr(demo, "why_not", lambda: "it needs root")
    result = CliRunner().invoke(main, ["demo", "--steps", "30", "--out", str(tmp_path / "demo")])
    assert result.exit_code == 0, result.output
    assert "is this machine's memory, and not slow: it needs root." in " ".join(result.output.split())
    rows = {
        line.split()[0]: line.split()
        for line in result.output.partition("Planned for real links")[2].splitlines()
        if line.strip()
    }
    for method in ("allreduce", "allreduce:wire=int8", "ab"):
        assert len(rows[method]) == 5  # a time at each of two rates
    assert (tmp_path / "demo" / "report.html").is_file() and (tmp_path / "demo" / "comparison.png").is_file()
