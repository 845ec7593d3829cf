"""What a replica says of itself: at attach, at its first decomposition, at the end, and its ledger in print."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
import small
import thinwire


def run(config: Any, model: nn.Module | None = None) -> Any:
    model = model or small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    for _ in small.walk(replica, optimizer, 0):
        pass
    replica.finish()
    return replica


def test_ab_says_what_it_factors_what_stays_full_and_what_came_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="thinwire")
    replica = run(small.ab())
    first, last = caplog.messages
    assert first == (
        "PaperAB on one worker: 2,538 parameters to train, 2 weights to factor; "
        "full: stem (first layer); head (last layer)"
    )
    after = sum(p.numel() for p in replica.parameters())
    assert after < 2538
    assert last.startswith(
        f"PaperAB finished after 21 steps: 2,538 parameters are now {after:,} ({2538 / after:.2f} : 1), 2 "
    )
    assert last.endswith("; full: stem (first layer); head (last layer)")


def test_a_run_that_makes_nothing_smaller_is_warned_of_at_once_with_a_cutoff_that_would(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(small.ab(cutoff=0.01))
    warning, last = caplog.messages
    assert warning.startswith("none of 2 weights could be factored at cutoff 0.01 after step 3: ranks are so high")
    assert (
        "so the model stays as large as it is" in warning and "saved" not in warning
    )  # averages save bytes all the same
    assert "did not make the model smaller" in last
    remedy = float(warning.partition("A cutoff of ")[2].split()[0])
    caplog.clear()
    replica = run(small.ab(cutoff=remedy))  # half of the layers are factored by it
    assert not caplog.messages and replica.finished_ranks


def test_others_say_their_workers_and_nothing_of_factors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="thinwire")
    run(thinwire.LocalSGD(every=4))
    assert caplog.messages == [
        "LocalSGD on one worker: 2,538 parameters to train",
        "LocalSGD finished after 21 steps",
    ]


def listen(rank: int) -> tuple[str, str, str]:
    heard = io.StringIO()
    logging.basicConfig(stream=heard, level=logging.INFO, format="%(message)s", force=True)
    replica = run(small.ab())
    return heard.getvalue(), str(replica.traffic), repr(replica.traffic)


def test_rank_0_speaks_for_all_and_the_ledger_is_a_table() -> None:
    (said, table, short), (silent, *_) = gang.run(listen, 2)
    assert silent == ""
    assert "PaperAB on 2 workers in 2 groups: 2,538 parameters to train" in said
    assert "left this node, 0." in said and "of fp32 all-reduce's 2" in said
    lines = table.splitlines()
    assert lines[0].split() == ["phase", "purpose", "slow", "link", "fast", "link", "calls"]
    assert lines[-1].startswith("all ") and any(line.startswith("groups") and "merge" in line for line in lines)
    assert short.startswith("<Ledger: ") and "left the node" in short


SCRIPT = """
import torch, thinwire{setup}
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), thinwire.AllReduce()).finish()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "heard"),
    [("", True), ("; import logging; logging.getLogger('thinwire').setLevel(logging.WARNING)", False)],
)
def test_a_script_without_logging_hears_it_and_can_silence_it(setup: str, heard: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(setup=setup))
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=clean, check=True)
    assert ("thinwire: AllReduce on one worker: 40 parameters to train" in done.stderr) == heard
    assert not done.stdout


def test_a_small_transformer_says_why_nothing_is_factored(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(
        nn.Flatten(2), nn.Linear(8, 16), nn.TransformerEncoder(layer, 1), nn.Flatten(), nn.Linear(128, 10)
    )
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab(cutoff=0.05))
    for number in range(small.STEPS):
        x, y = small.batch(0, number)
        loss = nn.functional.cross_entropy(replica(x.squeeze(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert "could be factored at cutoff 0.05" in caplog.text
