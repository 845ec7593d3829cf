"""The recipes' numbers, those of the papers as published: lengths, rates, schedules, sizes."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from standins import folder_for
from test_schedules import rates, timm
from thinwire import methods as config
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.experiments.augmentation import Pictures
from thinwire.experiments.data import Folder
from thinwire.experiments.series import Forecast, Halving
from thinwire.experiments.tables import RESNET50, VGG16, VIT_B16, nearest
from thinwire.launch.jobs import Job, variants
from thinwire.methods.registry import timetable_of
from thinwire.recipes import installed, named
from thinwire.train.data import Source
from thinwire.train.task import AsIs, describe_optimizer


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


# Schedules of methods.


def ab(recipe: str, *settings: str, method: str = "ab-paper", **more: Any) -> Any:
    return Job(recipe=recipe, method=method, out=Path("unused"), settings=settings, **more).config


def lengths(found: config.PaperAB) -> list[int]:
    return [found.warmup_length, found.group_length, found.rebound_length, found.lr_rebound_length]


def test_vgg16_has_the_published_counts() -> None:
    found = lengths(ab("vgg16-cifar10"))
    for ours, published in zip(found, (4330, 759, 60, 267), strict=True):
        assert ours == pytest.approx(published * 7324 / 7350, rel=0.01, abs=0.5)
        assert ours == pytest.approx(published, rel=0.01)
    assert lengths(ab("vgg16-cifar10", epochs=15)) == pytest.approx([n / 10 for n in found], abs=1.5)
    phases = [phase.name for phase in timetable_of(ab("vgg16-cifar10"))]
    assert phases.count("groups") == 3


def test_a_schedule_is_chosen_by_its_name() -> None:
    guided = ab("vgg16-cifar10", "schedule=guideline")
    assert (guided.warmup, guided.every, guided.rebound, guided.lr_rebound) == (0.20, 0.0333, 0.25, 0.5)
    assert ab("vgg16-cifar10", "ab-paper.schedule=guideline") == guided
    assert ab("vgg16-cifar10", "schedule=table") == ab("vgg16-cifar10") != guided
    typed = ab("vgg16-cifar10", "schedule=table", "warmup=100")
    assert lengths(typed)[0] == 100 and lengths(typed)[1:] == lengths(ab("vgg16-cifar10"))[1:]
    assert lengths(ab("vgg16-cifar10", "every=500"))[1] == 500


@pytest.mark.parametrize(
    ("recipe", "method", "said"),
    [
        (
            "vgg16-cifar10",
            "ab-paper",
            "unknown schedule of ab-paper on vgg16-cifar10 'paper', choose from: guideline, table",
        ),
        ("vgg16-cifar10", "daso", "the recipe vgg16-cifar10 has no schedules for daso"),
        ("digits", "ab-paper", "the recipe digits has no schedules for ab-paper to choose from"),
    ],
)
def test_a_schedule_that_is_not_there(recipe: str, method: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ab(recipe, "schedule=paper", method=method)
    result = CliRunner().invoke(main, ["run", recipe, "--method", method, "--set", "schedule=paper"])
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_comparison_deals_schedules_to_those_who_have_some(tmp_path: Path) -> None:
    scheduled = named("vgg16-cifar10").scheduled
    assert scheduled == {"ab-paper"}
    dealt = {v.method: v.settings for v in variants(None, ("schedule=guideline",), scheduled)}
    assert dealt.pop("ab-paper") == ("schedule=guideline",) and set(dealt.values()) == {()}
    own = variants("ab-paper,ab-paper:schedule=guideline", (), scheduled)
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
        assert recipe.defaults("ab-paper")["warmup"] == table[column].warmup / (150 * table[column].epoch)
        shared = named(f"{kind}-imagenet-global", workers=workers)
        assert (shared.batch, shared.steps) == (4096, round(150 * 1_281_167 / 4096))
        assert shared.defaults("ab-paper")["every"] == table[4096].group / (150 * table[4096].epoch)
    job = Job(recipe=f"{kind}-imagenet-local", method="ab-paper", out=Path("unused"), workers=16)
    assert job.trained.batch == 4096 and lengths(job.config)[:2] == pytest.approx(table[4096][:2], rel=0.05)


def test_every_schedule_of_every_recipe_fits() -> None:
    for name in installed():
        recipe = named(name)
        for method in recipe.suited:
            for schedule in recipe.suited[method].schedules or [None]:
                ab(name, *([f"schedule={schedule}"] if schedule else []), method=method)


# The numbers themselves. Those of the papers are of appendix A of D. Coquelin's dissertation, held here once more.


def read(table: str) -> dict[str, dict[str, Any]]:
    """Rows of a table by the name before them; `-` is nothing, numbers by commas are a tuple."""
    names, *rows = (line.split() for line in table.strip().splitlines())
    return {row[0]: dict(zip(names[1:], map(value, row[1:]), strict=True)) for row in rows}


def value(word: str) -> Any:
    if "," in word:
        return tuple(map(value, word.split(",")))
    plain = {"-": None, "yes": True, "no": False}
    if word in plain:
        return plain[word]
    return float(word) if word.replace(".", "").replace("e-", "").isdecimal() else word


TRAINED = read("""
recipe                    lr      decay  betas      clip  smoothing  batch  epochs  steps   patience  half
digits                    3e-3    3.0    0.9,0.999  1.0   0          64     30      600     -         no
shakespeare               6e-3    0.03   0.9,0.95   1.0   0          32     30      800     -         no
vgg16-cifar10             3e-3    0.1    0.9,0.999  1.0   0.1        1024   150     7324    -         yes
vgg16bn-cifar10           3e-3    0.1    0.9,0.999  1.0   0.1        1024   150     7324    -         yes
resnet18-cifar10          3e-3    0.1    0.9,0.999  1.0   0.1        1024   30      1465    -         yes
minivit-cifar10           1e-4    0.01   0.9,0.999  -     0.1        1024   300     14648   -         yes
minivit-cifar10-tuned     2e-4    0.01   0.9,0.999  -     0.1        1024   300     14648   -         yes
minivit-cifar100          1e-3    0.05   0.9,0.999  -     0.1        1024   125     6104    -         yes
resnet50-imagenet-local   3.5e-3  0.01   0.9,0.999  1.0   0.1        2048   150     93835   -         yes
resnet50-imagenet-global  3.5e-3  0.01   0.9,0.999  1.0   0.1        4096   150     46918   -         yes
vitb16-imagenet-local     3.5e-3  0.1    0.9,0.999  1.0   0.1        2048   150     93835   -         yes
vitb16-imagenet-global    3.5e-3  0.1    0.9,0.999  1.0   0.1        4096   150     46918   -         yes
vitb16-imagenet-oialr     1e-3    0.01   0.9,0.999  -     0.1        1024   125     156392  -         yes
autoformer-ettm2-96       4e-4    0.01   0.9,0.999  -     -          32     20      21481   3         no
autoformer-ettm2-192      4e-4    0.01   0.9,0.999  -     -          32     20      21421   3         no
autoformer-ettm2-336      4e-4    0.01   0.9,0.999  -     -          32     20      21331   3         no
autoformer-ettm2-720      4e-4    0.01   0.9,0.999  -     -          32     20      21091   3         no
autoformer-ettm2-tuned    1e-2    0.01   0.9,0.999  -     -          32     20      21481   3         no
gpt-wikitext2             2e-3    0.1    0.9,0.95   1.0   0          64     10      2550    -         yes
gpt124m-wikitext2         6e-4    0.1    0.9,0.95   1.0   0          64     10      1275    -         yes
""")
"""Tables A.1, A.2, A.4, A.6 and A.9, and their text; what they do not list is PyTorch's default."""

RISING = read("""
recipe                    warmup_epochs  warmup_lr  min_lr  k_decay  counts_from
digits                    1.5            -          3e-5    1        warm-up
shakespeare               1.5            -          6e-5    1        warm-up
vgg16-cifar10             10             -          0       1        start
vgg16bn-cifar10           10             -          0       1        start
resnet18-cifar10          2              -          0       1        start
minivit-cifar10           10             1e-5       1e-5    1        start
minivit-cifar10-tuned     17             8e-5       8e-4    0.4      start
minivit-cifar100          10             -          1e-5    1        warm-up
resnet50-imagenet-local   10             -          0       1        start
resnet50-imagenet-global  10             -          0       1        start
vitb16-imagenet-local     10             -          0       1        start
vitb16-imagenet-global    10             -          0       1        start
vitb16-imagenet-oialr     10             1e-5       1e-5    1        start
autoformer-ettm2-tuned    3              1e-4       4e-4    0.85     start
gpt-wikitext2             0.5            -          2e-5    1        warm-up
gpt124m-wikitext2         0.5            -          6e-6    1        warm-up
""")
"""Rates that rise and then follow a cosine, timm's with its defaults where the tables say no more.

A warm-up that begins at no given rate begins near zero. The other recipes have Autoformer's own rates.
"""


@pytest.mark.parametrize("name", installed())
def test_a_recipe_trains_as_told(name: str) -> None:
    recipe, told = named(name), TRAINED[name]
    found = describe_optimizer(recipe.optimizer)
    assert found["optimizer"] == "AdamW"
    assert (found["optimizer.lr"], found["optimizer.weight_decay"]) == (told["lr"], told["decay"])
    assert tuple(found["optimizer.betas"]) == told["betas"]
    for field in ("clip", "batch", "epochs", "steps", "patience"):
        assert getattr(recipe, field) == told[field], field
    assert recipe.autocast == told["half"]


@pytest.mark.parametrize("name", installed())
def test_a_recipes_rates_are_as_told(name: str) -> None:
    recipe, lr = named(name), TRAINED[name]["lr"]

    def rate(step: float) -> float:
        return lr * recipe.rate.factor(round(step), recipe.steps, recipe.epochs)

    epoch = recipe.steps / recipe.epochs
    if name not in RISING:  # 'type1'
        assert [rate((k + 0.5) * epoch) for k in range(5)] == pytest.approx([4e-4, 4e-4, 2e-4, 1e-4, 5e-5])
        return
    told = RISING[name]
    rising = round(told["warmup_epochs"] * epoch)
    first = told["warmup_lr"] or lr / (rising + 1)
    assert rate(0) == pytest.approx(first) and rate(rising - 1) < lr
    assert rate(recipe.steps) == pytest.approx(told["min_lr"])
    prefix = told["counts_from"] == "warm-up"
    length = recipe.steps - rising if prefix else recipe.steps
    shares = {"lr_min": told["min_lr"] / lr, "warmup_lr_init": first / lr, "k_decay": told["k_decay"]}
    for step in (rising // 2, rising, *(round(share * recipe.steps) for share in (0.2, 0.5, 0.9))):
        wanted = lr * timm(step, t_initial=length, warmup_t=rising, prefix=prefix, **shares)
        assert rate(step) == pytest.approx(wanted), step


@pytest.mark.parametrize("name", installed())
def test_smoothing_is_trained_on_and_not_judged_by(name: str) -> None:
    task, smoothing = named(name).task, TRAINED[name]["smoothing"]
    if smoothing is None:
        assert isinstance(task, Forecast)
        return
    outputs = 3 * torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(6)
    logs = outputs.log_softmax(1)
    plain, spread = -logs[range(6), targets].mean(), -logs.mean()
    torch.testing.assert_close(task.loss(outputs, targets), (1 - smoothing) * plain + smoothing * spread)
    judged = task.figures(task.totals(outputs, targets))
    assert judged["loss"] == pytest.approx(plain.item(), rel=1e-6)


SHOWN = read("""
recipe                    mean_of   scale    rand_augment  pad  flip  erase  crop  crop_pct  area
vgg16-cifar10             0.491400  -        -             4    yes   0      -     -         -
vgg16bn-cifar10           0.491400  -        -             4    yes   0      -     -         -
resnet18-cifar10          0.491400  -        -             4    yes   0      -     -         -
minivit-cifar10           0.491400  0.8,1.0  9             0    yes   0.25   -     -         -
minivit-cifar10-tuned     0.491400  0.8,1.0  9             0    yes   0.25   -     -         -
minivit-cifar100          0.507075  0.8,1.0  9             0    yes   0.25   -     -         -
resnet50-imagenet-local   0.485     -        -             0    yes   0      224   0.875     0.08,1.0
resnet50-imagenet-global  0.485     -        -             0    yes   0      224   0.875     0.08,1.0
vitb16-imagenet-local     0.485     -        -             0    yes   0      224   0.875     0.08,1.0
vitb16-imagenet-global    0.485     -        -             0    yes   0      224   0.875     0.08,1.0
vitb16-imagenet-oialr     0.485     -        15            0    yes   0.25   160   0.9       0.08,1.0
""")
"""What is done to images, and to which part of their files; `mean_of` is the mean of red."""


def test_images_are_shown_as_told(tmp_path: Path) -> None:
    for name in installed():
        shown = named(name).transform
        if name not in SHOWN:
            assert isinstance(shown, AsIs), name
            continue
        told = dict(SHOWN[name])
        assert isinstance(shown, Pictures)
        assert shown.statistics[0][0] == pytest.approx(told.pop("mean_of"), abs=1e-6), name
        size, crop_pct, area = (told.pop(field) for field in ("crop", "crop_pct", "area"))
        assert {field: getattr(shown, field) for field in told} == told, name
        if size:
            source = named(name).source(folder_for("imagenet", tmp_path))
            assert isinstance(source, Folder)
            assert (source.size, source.crop_pct, source.scale) == (size, crop_pct, area), name


VITS = read("""
recipe                  classes  image  patch  width  depth  heads  mlp   bias  dropout  drop_path
minivit-cifar10         10       32     8      768    6      6      3072  no    0        0.2
minivit-cifar10-tuned   10       32     8      768    6      6      3072  no    0        0.2
minivit-cifar100        100      32     8      192    6      6      768   no    0        0.1
vitb16-imagenet-local   1000     224    16     768    12     12     3072  yes   0        0.1
vitb16-imagenet-global  1000     224    16     768    12     12     3072  yes   0        0.1
vitb16-imagenet-oialr   1000     160    16     768    12     12     3072  yes   0.1      0
""")


def built(name: str) -> Any:
    """The whole model, without values."""
    words = {"shakespeare": 65, "gpt-wikitext2": 33_278, "gpt124m-wikitext2": 33_278}
    with torch.device("meta"):
        return named(name).model(cast(Source, SimpleNamespace(vocabulary=words.get(name))))


def dropout(model: nn.Module) -> float:
    return max((module.p for module in model.modules() if isinstance(module, nn.Dropout)), default=0.0)


def drop_path(model: nn.Module) -> float:
    """Of the last block, by our name for it or timm's."""
    paths = [module for module in model.modules() if type(module).__name__ == "DropPath"]
    return max((getattr(path, "rate", None) or getattr(path, "drop_prob", 0.0) for path in paths), default=0.0)


@pytest.mark.parametrize("name", VITS)
def test_vits_have_the_told_sizes(name: str) -> None:
    model = built(name)
    last = model.blocks[-1]
    patch = model.patch_embed.proj.kernel_size[0]
    assert VITS[name] == {
        "classes": model.head.out_features,
        "image": patch * math.isqrt(model.pos_embed.shape[1] - 1),
        "patch": patch,
        "width": model.head.in_features,
        "depth": len(model.blocks),
        "heads": getattr(last.attn, "num_heads", None) or last.attn.heads,
        "mlp": last.mlp.fc1.out_features,
        "bias": last.attn.qkv.bias is not None,
        "dropout": dropout(model),
        "drop_path": drop_path(model),
    }


def test_the_other_models_have_the_told_sizes() -> None:
    for name in ("resnet50-imagenet-local", "resnet50-imagenet-global"):
        model = built(name)
        assert (model.fc.in_features, model.fc.out_features, model.dropout.p) == (2048, 1000, 0.1)
    assert dropout(built("gpt-wikitext2")) == dropout(built("gpt124m-wikitext2")) == 0.2
    for horizon in (96, 192, 336, 720, "tuned"):
        model = built(f"autoformer-ettm2-{horizon}")
        assert (model.inputs, model.label, model.horizon) == (96, 48, 96 if horizon == "tuned" else horizon)
        assert (model.variables, model.head.out_features, model.head.in_features) == (7, 7, 512)
        assert (len(model.encoder), len(model.decoder), dropout(model)) == (2, 1, 0.05)
        first = model.encoder[0]
        assert (first.feed.widen.out_channels, first.correlation.factor, model.decompose.window) == (2048, 1, 25)


OIALR = read("""
recipe                  delay  frequency  cutoff  keep_first  keep_last  warmup
minivit-cifar10         4000   1000       0.2     no          yes        yes
minivit-cifar10-tuned   4000   1000       0.2     no          yes        yes
vitb16-imagenet-oialr   25000  1000       0.1     no          yes        yes
autoformer-ettm2-96     600    400        0.4     yes         yes        no
autoformer-ettm2-192    600    400        0.4     yes         yes        no
autoformer-ettm2-336    600    400        0.4     yes         yes        no
autoformer-ettm2-720    600    400        0.4     yes         yes        no
autoformer-ettm2-tuned  600    400        0.4     yes         yes        no
""")
"""Delay and stability frequency in steps; `warmup` is whether it starts at full rank."""


@pytest.mark.parametrize("name", OIALR)
def test_oialr_has_the_published_counts(name: str) -> None:
    found, told = ab(name, method="oialr"), dict(OIALR[name])
    assert (found.updates_start, found.update_length) == (told.pop("delay"), told.pop("frequency"))
    assert (found.warmup_length > 0) == told.pop("warmup")
    assert {field: getattr(found, field) for field in told} == told


PUBLISHED = read("""
table           warmup  group  rebound  lr_rebound  epoch
VGG16           4330    759    60       267         49
RESNET50-2048   24000   6000   600      1500        600
RESNET50-4096   9300    3000   300      750         300
RESNET50-8192   6150    1500   150      325         150
RESNET50-16384  3750    600    75       188         75
RESNET50-32768  1900    400    38       94          38
VIT_B16-2048    24000   4360   600      1500        600
VIT_B16-4096    12300   2180   300      750         300
VIT_B16-8192    6150    1500   150      325         150
VIT_B16-16384   3750    750    75       188         75
VIT_B16-32768   1520    270    38       94          38
""")
"""AB's warmupSteps, numABSteps, fullRankReboundSteps and LR rebound steps, and iterations per epoch; A.7 to A.9."""


def test_ab_has_the_published_counts() -> None:
    known = {
        f"{name}-{batch}": row for name, t in (("RESNET50", RESNET50), ("VIT_B16", VIT_B16)) for batch, row in t.items()
    }
    known["VGG16"] = VGG16
    assert {name: row._asdict() for name, row in known.items()} == PUBLISHED
    for name, told in PUBLISHED.items():
        found = config.PaperAB(total_steps=int(150 * told["epoch"]), **known[name].fields())
        assert lengths(found) == list(told.values())[:4], name
    for name in ("vgg16-cifar10", "vgg16bn-cifar10", "resnet50-imagenet-global", "vitb16-imagenet-global"):
        found = ab(name)
        assert (found.cutoff, found.keep_first, found.keep_last) == (0.15, True, True)
        column = {"v": "VGG16", "r": "RESNET50-4096"}[name[0]] if "vit" not in name else "VIT_B16-4096"
        assert lengths(found) == pytest.approx(list(PUBLISHED[column].values())[:4], rel=0.05), name
