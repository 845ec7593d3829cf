"""What the ledger sums, and the dissertation's counts: ECR (Eq. 5.10) and scaled traffic (Eq. 5.9)."""

import json
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import Sent, Topology, count_edges
from thinwire.recipes import named
from thinwire.train import fit
from thinwire.train.summary import Counts
from thinwire.train.summary import counted_figures as figures


@pytest.mark.parametrize("senders", [None, (1, 2, 5)])
def test_in_a_mesh_each_sends_to_each_other(senders: tuple[int, ...] | None) -> None:
    members, node_of = (0, 1, 2, 4, 5), {0: 0, 1: 0, 2: 1, 4: 2, 5: 2}
    pairs = [(node_of[a], node_of[b]) for a in senders or members for b in members if a != b]
    found = count_edges("mesh", members, node_of, senders)
    for node in range(3):
        assert found.leaving[node] == sum(a == node != b for a, b in pairs)
        assert found.staying[node] == sum(a == node == b for a, b in pairs)
    assert found.busiest == max(found.leaving.values())


def test_in_a_star_each_sends_to_the_first_and_is_answered() -> None:
    nodes = ((0, 1), (2, 3))
    found = [Topology(rank, nodes, nodes).star((0, 1, 2, 3), 40) for rank in range(4)]
    assert [(sent.slow, sent.slow_queue) for sent in found] == [(80, 80)] * 4  # two answers, or two calls
    assert {sent.slow_rounds for sent in found} == {2}
    alone = Topology(0, ((0, 1),), ((0, 1),)).star((0, 1), 40)
    assert (alone.slow, alone.slow_queue, alone.fast) == (0, 0, 80)


def test_the_ledger_sums_by_phase_by_purpose_and_by_link() -> None:
    ledger = Ledger()
    ledger.record("gradients", Sent(slow=10, fast=4), times=2)
    ledger.phase = "local"
    ledger.record("parameters", Sent(slow=5), calls=3)
    ledger.record("control", Sent(fast=1))
    rows = {what: row["slow_bytes"] for what, row in ledger.by_phase.items()}
    assert rows == {"attach": 20, "local": 5}
    assert {what: row["fast_bytes"] for what, row in ledger.by_purpose.items()} == {
        "gradients": 8,
        "parameters": 0,
        "control": 1,
    }
    assert (ledger.slow_bytes, ledger.fast_bytes, ledger.slow_calls) == (25, 9, 5)


def told(counts: Counts, **sizes: Any) -> dict[str, Any]:
    return figures(
        counts, **{"trainable_full": 1000, "full": 1000, "final": 1000, "wall_s": 10.0, "factored": True, **sizes}
    )


def test_the_published_figure_of_oialr_on_vgg16() -> None:
    """13.88 % trainable, a quarter of the run at full rank: 64.59 % less is expected to be sent."""
    counts = Counts(trainable=13880)
    for step in range(100):
        counts.count(together=True, full=step < 25)
    found = told(counts, trainable_full=100_000, full=100_000, final=27_000)
    assert found["trainable_share"] == pytest.approx(0.1388)
    assert found["ecr"]["ecr"] == pytest.approx(0.6459, abs=5e-5)
    assert found["ecr"]["ecr_assumed"] == pytest.approx(0.6459, abs=5e-5)


def test_groups_that_train_alone_send_nothing() -> None:
    counts = Counts(trainable=1000)
    for step in range(10):
        counts.count(together=step < 4, full=step < 4)
    found = told(counts, final=500)
    assert found["ecr"] == {
        "full": 0.4,
        "compressed": pytest.approx(0.0),
        "fraction": 0.5,
        "ecr": pytest.approx(0.6),
        "ecr_assumed": pytest.approx(0.375),
    }
    assert found["scaled_traffic"]["bytes_per_s"] == pytest.approx(4 * 4000 / 10 / 0.54)
    assert found["scaled_traffic"]["vs_full"] == pytest.approx(0.4)


@pytest.mark.parametrize("together", range(1, 24))
def test_shares_that_are_nothing_are_zero_and_not_nearly_so(together: int) -> None:
    counts = Counts(trainable=1000)
    for step in range(24):
        counts.count(together=step < together, full=step < together)
    assert told(counts)["ecr"]["compressed"] == 0.0
    counts = Counts(trainable=1000)
    for step in range(24):
        counts.count(together=True, full=step < together)
    assert told(counts)["ecr"]["ecr"] == 0.0


def test_averages_now_and_then_have_no_estimate() -> None:
    counts = Counts(trainable=1000)
    for _ in range(4):
        counts.count(together=False, full=True)
    found = told(counts, factored=False)
    assert found["ecr"] is None and found["scaled_traffic"] is None and found["trainable_share"] == 1.0


def test_every_run_reports_them_also_one_that_was_resumed(tmp_path: Path) -> None:
    recipe = named("digits", steps=12, eval_every=4)
    config = thinwire.OIALR(total_steps=12, factor_at=4, redecompose=2, layer_fraction=1.0)
    whole = fit(recipe, config, out=tmp_path / "whole", save_every=8, model=False)
    assert whole["trainable_full"] == whole["parameters_full"] == 226794
    assert whole["trainable_final"] < 0.5 * 226794 < whole["parameters_in_training"]
    assert whole["ecr"]["full"] == pytest.approx(1 / 3) and whole["ecr"]["compressed"] == pytest.approx(2 / 3)
    assert 1 / 3 < whole["scaled_traffic"]["vs_full"] < 1
    resumed = fit(recipe, config, out=tmp_path / "whole", resume=True, model=False)
    for name in ("trainable_final", "trainable_share", "parameters_in_training", "ecr", "ranks"):
        assert resumed[name] == whole[name]
    records = [json.loads(line) for line in (tmp_path / "whole" / "records.jsonl").read_text().splitlines()]
    sizes = [r["trainable"] for r in records if r["kind"] == "evaluation" and r["model"] != "finished"]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == whole["trainable_final"]
    ranks = [r["ranks"] for r in records if r["kind"] == "ranks"]
    assert len(ranks) >= 4
    full = {told["layer"].removesuffix(".weight") for told in whole["kept_full"]}
    assert whole["ranks"] == {label: rank for label, rank in ranks[-1].items() if label not in full}
