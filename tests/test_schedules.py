"""Rates over a run, its length, and the schedules by which methods go."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from thinwire import config
from thinwire.cli import main
from thinwire.errors import ConfigError
from thinwire.jobs import Job, variants
from thinwire.methods.ab_timetable import timetable
from thinwire.recipes import RECIPES, named
from thinwire.recipes.tables import RESNET50, VIT_B16, nearest
from thinwire.train.schedule import Cosine, Halving, Rate, scheduled


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


def test_halving_begins_with_the_third_epoch() -> None:
    seen = rates(Halving(), 40, epochs=5)
    by_epoch = [sorted(set(seen[8 * epoch : 8 * (epoch + 1)])) for epoch in range(5)]
    # 'type1' of Autoformer's authors sets lr · 0.5^(epoch − 1) after epoch 1, 2, …
    assert by_epoch == [[1.0], [1.0], [0.5], [0.25], [0.125]]


@pytest.mark.parametrize("name", ["minivit-cifar10-tuned", "autoformer-ettm2-tuned", "vgg16-cifar10"])
def test_rates_scale_with_the_run(name: str) -> None:
    whole = named(name)
    half = whole.over(whole.epochs // 2)
    for share in (0.0, 0.03, 0.1, 0.4, 0.9, 1.0):
        long, short = (r.rate.factor(round(share * r.steps), r.steps, r.epochs) for r in (whole, half))
        assert short == pytest.approx(long, abs=0.02), share


def test_an_epoch_of_a_short_run_is_an_epoch() -> None:
    whole = named("autoformer-ettm2-96")
    short = whole.over(6)
    for epoch in (0.5, 1.5, 2.5, 5.5):
        found = {r.rate.factor(round(epoch * r.steps_per_epoch), r.steps, r.epochs) for r in (whole, short)}
        assert found == {0.5 ** max(0, int(epoch) - 1)}


@pytest.mark.parametrize("fields", [{"warmup": 1.0}, {"warmup": -0.1}, {"k_decay": 0.0}])
def test_a_rate_that_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    [name] = fields
    with pytest.raises(ConfigError, match=f"`{name}`="):
        Cosine(**fields)  # type: ignore[arg-type]


# How long a run is.


def test_over_keeps_the_epochs_length() -> None:
    whole = named("vgg16-cifar10")
    assert (whole.steps, whole.epochs) == (7324, 150)
    short = whole.over(10)
    assert (short.steps, short.epochs) == (488, 10)
    assert named("vgg16-cifar10", epochs=10).steps == 488
    assert short.ends_epoch(488) and sum(short.ends_epoch(step) for step in range(1, 489)) == 10
    with pytest.raises(ConfigError, match="`epochs` must be at least 1, got 0"):
        whole.over(0)
    with pytest.raises(ConfigError, match=r"both `--steps 5` and `--epochs 2` .*; give one of them"):
        named("digits", steps=5, epochs=2)


def test_epochs_and_steps_on_the_command_line(tmp_path: Path) -> None:
    words = ["run", "digits", "--method", "allreduce", "--workers", "1", "--no-model", "--json"]
    for given, steps in ((["--epochs", "1"], 20), (["--steps", "3"], 3)):
        result = CliRunner().invoke(main, [*words, *given, "--out", str(tmp_path / given[0])])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["steps"] == steps
    result = CliRunner().invoke(main, [*words, "--epochs", "1", "--steps", "3", "--out", str(tmp_path / "both")])
    assert result.exit_code == 2 and "give one of them" in result.output and not (tmp_path / "both").exists()
    # Its workers are told the same.
    arguments = Job(recipe="digits", method="ab", out=tmp_path, epochs=7).arguments()
    assert arguments[arguments.index("--epochs") + 1] == "7" and "--steps" not in arguments


# Schedules of methods.


def ab(recipe: str, *settings: str, method: str = "ab", **more: Any) -> Any:
    return Job(recipe=recipe, method=method, out=Path("unused"), settings=settings, **more).config


def lengths(found: config.AB) -> list[int]:
    return [found.warmup_length, found.group_length, found.rebound_length, found.lr_rebound_length]


def test_vgg16_has_the_published_counts() -> None:
    found = lengths(ab("vgg16-cifar10"))
    for ours, published in zip(found, (4330, 759, 60, 267), strict=True):
        assert ours == pytest.approx(published * 7324 / 7350, rel=0.01, abs=0.5)
        assert ours == pytest.approx(published, rel=0.01)
    assert lengths(ab("vgg16-cifar10", epochs=15)) == pytest.approx([n / 10 for n in found], abs=1.5)
    phases = [segment.phase for segment in timetable(ab("vgg16-cifar10"))]
    assert phases.count("groups") == 3


def test_a_schedule_is_chosen_by_its_name() -> None:
    guided = ab("vgg16-cifar10", "schedule=guideline")
    assert (guided.warmup, guided.group_steps, guided.rebound, guided.lr_rebound) == (0.20, 0.0333, 0.25, 0.5)
    assert ab("vgg16-cifar10", "ab.schedule=guideline") == guided
    assert ab("vgg16-cifar10", "schedule=table") == ab("vgg16-cifar10") != guided
    typed = ab("vgg16-cifar10", "schedule=table", "warmup=100")
    assert lengths(typed)[0] == 100 and lengths(typed)[1:] == lengths(ab("vgg16-cifar10"))[1:]
    assert lengths(ab("vgg16-cifar10", "group_steps=500"))[1] == 500


@pytest.mark.parametrize(
    ("recipe", "method", "said"),
    [
        ("vgg16-cifar10", "ab", "unknown schedule of ab on vgg16-cifar10 'paper', choose from: guideline, table"),
        ("vgg16-cifar10", "daso", "the recipe vgg16-cifar10 has no schedules for daso"),
        ("digits", "ab", "the recipe digits has no schedules for ab to choose from"),
    ],
)
def test_a_schedule_that_is_not_there(recipe: str, method: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ab(recipe, "schedule=paper", method=method)
    result = CliRunner().invoke(main, ["run", recipe, "--method", method, "--set", "schedule=paper"])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_comparison_deals_schedules_to_those_who_have_some(tmp_path: Path) -> None:
    scheduled = named("vgg16-cifar10").scheduled
    assert scheduled == {"ab"}
    dealt = {v.method: v.settings for v in variants(None, ("schedule=guideline",), scheduled)}
    assert dealt.pop("ab") == ("schedule=guideline",) and set(dealt.values()) == {()}
    own = variants("ab,ab:schedule=guideline", (), scheduled)
    assert [v.settings for v in own] == [(), ("schedule=guideline",)]
    # With nobody to take it, it goes to all, and the check says so.
    words = ["compare", "digits", "--methods", "allreduce", "--set", "schedule=table", "--out", str(tmp_path / "c")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "has no schedules for allreduce" in result.output


@pytest.mark.parametrize(("kind", "table"), [("resnet50", RESNET50), ("vitb16", VIT_B16)])
def test_imagenet_goes_by_the_number_of_workers(kind: str, table: dict[int, Any]) -> None:
    for workers, column in ((1, 2048), (8, 2048), (16, 4096), (24, 8192), (32, 8192), (128, 32768), (512, 32768)):
        recipe = named(f"{kind}-imagenet-local", workers=workers)
        assert recipe.batch == 256 * workers
        assert recipe.steps == round(150 * 1_281_167 / recipe.batch)
        assert nearest(table, recipe.batch) is table[column]
        assert recipe.defaults("ab")["warmup"] == table[column].warmup / (150 * table[column].epoch)
        shared = named(f"{kind}-imagenet-global", workers=workers)
        assert (shared.batch, shared.steps) == (4096, round(150 * 1_281_167 / 4096))
        assert shared.defaults("ab")["group_steps"] == table[4096].group / (150 * table[4096].epoch)
    job = Job(recipe=f"{kind}-imagenet-local", method="ab", out=Path("unused"), workers=16)
    assert job.trained.batch == 4096 and lengths(job.config)[:2] == pytest.approx(table[4096][:2], rel=0.05)


def test_every_schedule_of_every_recipe_fits() -> None:
    for name in RECIPES:
        recipe = named(name)
        for method in recipe.suited:
            for schedule in recipe.suited[method].schedules or [None]:
                ab(name, *([f"schedule={schedule}"] if schedule else []), method=method)
