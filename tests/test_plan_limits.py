"""What is planned by default, and advice that knows where methods were measured to lose accuracy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import thinwire
from thinwire.cli import main
from thinwire.commands.plan import configs_of
from thinwire.methods.registry import METHODS
from thinwire.plan.compute import given
from thinwire.plan.forecast import Layout, Links
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.recommend import LIMITS, limits_of
from thinwire.plan.workload import Workload

ROOT = Path(__file__).parents[1]


def workload(vocabulary: int = 0, **changes: Any) -> Workload:
    first = nn.Embedding(vocabulary, 32) if vocabulary else nn.Linear(32, 32)
    model = nn.Sequential(first, nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32))
    return Workload(**{"name": "layers", "model": model, "optimizer": torch.optim.AdamW, "steps": 10_000, **changes})


def planned(what: Workload, methods: str | None = None) -> dict[str, Any]:
    return configs_of(None, what, {"methods": methods, "settings": (), "group_size": None})


def test_a_plan_has_the_rows_of_the_readme() -> None:
    table = (ROOT / "README.md").read_text().split("## Which method do I want?")[1].split("\n\n")[1]
    rows = re.findall(r"\[`(\w+)\(", table)
    configs = list(planned(workload()).values())
    assert sorted(type(config).__name__ for config in configs) == sorted(rows)
    line = re.search(r"thinwire\.DiLoCo\(.*?\n\)", (ROOT / "docs" / "which-method.md").read_text(), re.DOTALL)
    assert line is not None and eval(line[0]) in configs
    assert {thinwire.AllReduce(), thinwire.AllReduce(wire="int8"), thinwire.AB(total_steps=10_000)} <= set(configs)


def test_words_are_planned_with_what_the_docs_have_for_them() -> None:
    line = re.search(r"thinwire\.LocalSGD\(.*second_moment.*\)", (ROOT / "docs" / "training-apart.md").read_text())
    assert line is not None
    wanted = eval(line[0].replace("…", "10_000"))
    assert wanted in planned(workload(8_192)).values()
    assert wanted not in planned(workload(256)).values()


def test_all_methods_are_planned_on_request_and_those_that_decompose_last() -> None:
    names = list(planned(workload(), "all"))
    assert set(names) == {*METHODS, "allreduce:wire=int8"}
    assert names.index("powersgd") < names.index("ab") and list(planned(workload()))[-1] == "ab"


AB, DILOCO = thinwire.AB(total_steps=10_000), thinwire.DiLoCo(every=24, wire="int2")
SHARED = thinwire.LocalSGD(every=3, wire="int2", second_moment="shared")


@pytest.mark.parametrize(
    ("config", "groups", "changes", "says"),
    [
        (AB, 4, {}, []),
        (AB, 8, {}, ["many groups"]),
        (DILOCO, 16, {}, ["many groups"]),
        (AB, 4, {"steps": 900}, ["short runs"]),
        (AB, 16, {"steps": 600, "recipe": "digits"}, []),
        (AB, 4, {"vocabulary": 50_257}, ["42 %"]),
        (DILOCO, 4, {"vocabulary": 50_257}, ["32 %"]),
        (SHARED, 8, {"vocabulary": 50_257}, []),
        (thinwire.AllReduce(wire="int8"), 128, {"vocabulary": 50_257, "steps": 10}, []),
        (thinwire.OneBit(), 4, {}, ["for SGD"]),
        (thinwire.OneBit(), 4, {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, []),
        (thinwire.PowerSGD(), 4, {"vocabulary": 50_257}, ["not measured", "VGG16-BN"]),
    ],
)
def test_limits_are_those_that_were_measured(config: Any, groups: int, changes: Any, says: list[str]) -> None:
    found = limits_of(workload(**changes), config, groups)
    assert len(found) == len(says) and all(part in limit.says for part, limit in zip(says, found, strict=True))


def test_every_limit_has_its_source() -> None:
    assert all((ROOT / limit.source).exists() for limit in LIMITS)


def advice(what: Workload, nodes: int) -> tuple[Any, str]:
    watch, layout = Stopwatch(what, given(0.001)), Layout(workers=nodes, nodes=nodes)
    plan = make_plan(what, planned(what), layout, Links(bandwidth=1e7), stopwatch=watch, bounds=False)
    return plan.recommendation, " ".join(plan.recommendation.lines())


def test_advice_prefers_what_has_no_limit_and_says_why() -> None:
    """AB would be faster, and is named with what it loses."""
    what = workload(6_000, steps=2_000)
    found, words = advice(what, 4)
    assert found.best.method.startswith("localsgd:") and "second_moment=shared" in found.best.method
    (ab,) = [own for own in found.faster if own.method == "ab"]
    assert ab.speedup > found.best.speedup and "Not advised here: ab" in words and "benchmarks/words" in words
    assert json.loads(json.dumps(found.as_dict()))["faster"]


def test_advice_for_a_long_run_on_few_groups_is_the_fastest() -> None:
    found, words = advice(workload(steps=2_000), 4)
    assert found.best.method.partition(":")[0] in ("ab", "diloco") and not found.faster and "Not advised" not in words
    found, words = advice(workload(steps=2_000), 8)
    assert found.best.method == "allreduce:wire=int8" and "many groups" in words


def test_long_labels_are_cut_in_the_table_and_whole_in_the_caption(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "from torch import nn\ndef build(): return nn.Sequential(*[nn.Linear(9, 9)] * 4)\n"
    )
    words = ["plan", "--model", f"{tmp_path / 'tiny.py'}:build", "--steps", "40", "--compute", "5ms", "--quiet"]
    settings = "diloco:every=8:wire=int2:outer=1.0/0.5:warmup=2"
    result = CliRunner().invoke(main, [*words, "--methods", settings, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    row = next(line for line in lines if line.split()[:1] == ["diloco:every=8:wire=int2…"])
    heading = next(line for line in lines if line.split()[:1] == ["method"])
    assert abs(len(row.rstrip()) - len(heading.rstrip())) <= 2 and f"is {settings}." in result.stdout
