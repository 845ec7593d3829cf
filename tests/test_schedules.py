"""Rates over a run, and its length on the command line."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.launch.jobs import Job
from thinwire.train.schedule import Cosine, Rate, scheduled


def rates(rate: Rate, steps: int, epochs: float = 1) -> list[float]:
    """Those of every step, and of some beyond the end."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = scheduled(optimizer, rate, steps=steps, epochs=epochs)
    seen = []
    for _ in range(steps + 20):
        seen.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_rises_and_falls() -> None:
    seen = rates(Cosine(warmup=0.1), 100)
    assert seen[0] < 0.1 and seen[10] == max(seen) == 1.0
    assert all(a > b for a, b in pairwise(seen[10:100]))
    assert seen[100:] == pytest.approx([0.01] * 20)


def timm(
    step: int, *, t_initial: int, lr_min: float, warmup_t: int, warmup_lr_init: float, k_decay: float, prefix: bool
) -> float:
    """`CosineLRScheduler` of timm with a base rate of 1 and one cycle; `prefix` is its `warmup_prefix`."""
    if step < warmup_t:
        return warmup_lr_init + step * (1 - warmup_lr_init) / warmup_t
    t = step - warmup_t if prefix else step
    if t >= t_initial:
        return lr_min
    return lr_min + 0.5 * (1 - lr_min) * (1 + math.cos(math.pi * t**k_decay / t_initial**k_decay))


@pytest.mark.parametrize(
    ("lr_min", "warmup_lr_init", "k_decay"), [(0.1, 0.1, 1.0), (4.0, 0.4, 0.4), (0.04, 0.01, 0.85), (0.0, 0.01, 2.0)]
)
@pytest.mark.parametrize("prefix", [False, True])
def test_cosine_is_timms(lr_min: float, warmup_lr_init: float, k_decay: float, prefix: bool) -> None:
    steps, rising = 90, 12
    rate = Cosine(warmup=rising / steps, floor=lr_min, start=warmup_lr_init, k_decay=k_decay, from_zero=not prefix)
    length = steps - rising if prefix else steps
    shared = {"lr_min": lr_min, "warmup_lr_init": warmup_lr_init, "k_decay": k_decay, "prefix": prefix}
    wanted = [timm(step, t_initial=length, warmup_t=rising, **shared) for step in range(steps + 20)]
    assert rates(rate, steps) == pytest.approx(wanted)
    assert (wanted[-1] > wanted[rising]) == (lr_min > 1)


@pytest.mark.parametrize("fields", [{"warmup": 1.0}, {"warmup": -0.1}, {"k_decay": 0.0}])
def test_a_rate_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    [name] = fields
    with pytest.raises(ConfigError, match=f"`{name}`="):
        Cosine(**fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_epochs_and_steps_on_the_command_line(tmp_path: Path) -> None:
    words = ["run", "digits", "--method", "allreduce", "--workers", "1", "--no-model", "--json"]
    for given, steps in ((["--epochs", "1"], 20), (["--steps", "3"], 3)):
        result = CliRunner().invoke(main, [*words, *given, "--out", str(tmp_path / given[0])])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["steps"] == steps
    result = CliRunner().invoke(main, [*words, "--epochs", "1", "--steps", "3", "--out", str(tmp_path / "both")])
    assert result.exit_code == 2 and "give one of them" in result.output and not (tmp_path / "both").exists()
    # Its workers are told the same.
    arguments = Job(recipe="digits", method="ab-paper", out=tmp_path, epochs=7).words()
    assert arguments[arguments.index("--epochs") + 1] == "7" and "--steps" not in arguments
