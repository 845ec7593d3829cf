"""What is compared, by sets."""

from pathlib import Path
from typing import Any

from setting import Setting, by

HERE = Path(__file__).parent
RESIZED = f"{HERE.parent / 'papers' / 'cifar_resized.py'}:vgg16"
"""134 M parameters without BatchNorm: one worker with the whole batch is the same but for rounding."""


def vgg(name: str, method: str, *fields: str, **more: Any) -> Setting:
    """On VGG16-BN over 40 epochs, unless `more` has other values."""
    usual = {"recipe": "vgg16bn-cifar10", "epochs": 40, "eval_every": 195}
    return Setting(name, method, fields, **usual | more)


def ab(name: str, *fields: str, **more: Any) -> Setting:
    return vgg(f"ab-{name}", "ab", *fields, **more)


def six(name: str, *fields: str) -> Setting:
    """Factored at 60 % of the run, so that what happens afterwards is seen for longer."""
    return ab(name, "factor_at=0.6", *fields)


def at_constant_rate(setting: Setting) -> Setting:
    """The same without annealing."""
    return setting._replace(name=f"{setting.name}-constant", recipe=f"{HERE / 'constant.py'}:vgg16_bn", epochs=20)


def long(setting: Setting, epochs: int) -> Setting:
    """The same over so many epochs, with as many evaluations."""
    name = f"{setting.name}-{epochs}epochs"
    return setting._replace(name=name, epochs=epochs, eval_every=round(4.88 * epochs), keeps_model=False)


def of_resnet18(setting: Setting) -> Setting:
    """The same on another model, over that recipe's own epochs."""
    name, recipe = f"resnet18-{setting.name}", "resnet18-cifar10"
    return setting._replace(name=name, recipe=recipe, epochs=30, eval_every=146, keeps_model=False)


ALLREDUCE = vgg("allreduce", "allreduce", keeps_model=True)
DEFAULT = ab("default")
FULL = ab("full", "factor_at=none", keeps_model=True)
PAPER = vgg("ab-paper", "ab-paper")
GROW = ("every=10", "every_max=96")
CHEAP = ("warmup=0.05", "warmup_wire=lowrank:16")

SETS: dict[str, list[Setting]] = {
    "allreduce": [ALLREDUCE],
    "defaults": [DEFAULT, FULL],
    "search": [
        FULL,
        six("at60"),
        ab("at50", "factor_at=0.5"),
        ab("at75", "factor_at=0.75"),
        ab("start", "factor_at=0.05"),
        six("match", "match_rate=true"),
        six("moments", "moments=average"),
        six("match-moments", "match_rate=true", "moments=average"),
        six("both", "train=both"),
        six("both-match", "train=both", "match_rate=true"),
        six("split", "train=split"),
        six("every12", "every=12"),
        six("int4", "wire=int4"),
        six("target5", "target=5"),
        six("recut8", "redecompose=8"),
        six("grow", "every_max=96"),
        six("radial", "outer=radial"),
        six("none", "outer=none"),
        six("overlap4", "overlap=4"),
    ],
    "grow": [
        ab("grow10", "factor_at=none", *GROW),
        ab("grow10-75", *GROW),
        ab("grow10-75-target5", "target=5", *GROW),
        ab("grow10-85-target5", "target=5", "factor_at=0.85", *GROW),
    ],
    "outer": [
        ab("momentum06", "factor_at=none", "outer=1.0/0.6"),
        ab("momentum07", "factor_at=none", "outer=1.0/0.7"),
        ab("momentum08", "factor_at=none", "outer=1.0/0.8"),
        ab("rate15", "factor_at=none", "outer=1.5/0.5"),
        ab("warm-int2", "factor_at=none", "warmup=0.03", "warmup_wire=int2"),
        ab("75-target5", "target=5"),
        ab("momentum07-target5", "outer=1.0/0.7", "target=5"),
        ab("momentum07-target5-at85", "outer=1.0/0.7", "target=5", "factor_at=0.85"),
        ab("decay-half", "factor_at=none", options=("--weight-decay", "0.05")),
        ab("decay-double", "factor_at=none", options=("--weight-decay", "0.2")),
        vgg("allreduce-decay-double", "allreduce", options=("--weight-decay", "0.2")),
        ab("momentum07-decay", "factor_at=none", "outer=1.0/0.7", options=("--weight-decay", "0.033")),
        ab("lr14", "factor_at=none", options=("--lr", "0.0042")),
        ab("lr2-decay-half", "factor_at=none", options=("--lr", "0.006", "--weight-decay", "0.05")),
        ab("warm10-rank8", "factor_at=none", "warmup=0.1", "warmup_wire=lowrank:8"),
        ab("grow9", "factor_at=none", "every=9", "every_max=96"),
        ab("75-target5-decay-half", "target=5", options=("--weight-decay", "0.05")),
        ab("75-target5-warm8", "target=5", "warmup=0.08"),
        ab("85-target5", "target=5", "factor_at=0.85"),
        by(ab("momentum075", "factor_at=none", "outer=1.0/0.75", options=("--weight-decay", "0.025")), 16),
    ],
    "constant": [at_constant_rate(s) for s in (six("at60"), six("split", "train=split"), six("both", "train=both"))],
    "rivals": [
        vgg("localsgd-24-int4", "localsgd", "every=24", "wire=int4", *CHEAP),
        vgg("localsgd-24-int2", "localsgd", "every=24", "wire=int2", *CHEAP),
        vgg("localsgd-12-int2", "localsgd", "every=12", "wire=int2", *CHEAP),
        vgg("diloco-48-int2", "diloco", "every=48", "wire=int2", "outer=1.0/0.5", *CHEAP),
        vgg("diloco-24-int2-paper", "diloco", "every=24", "wire=int2", "outer=0.7/0.9", *CHEAP),
        vgg("powersgd-4", "powersgd", "rank=4", *CHEAP),
        vgg("powersgd-2", "powersgd", "rank=2", *CHEAP),
        vgg("topk-0.001", "topk", "density=0.001", "ramp=0", *CHEAP),
        vgg("topk-0.003", "topk", "density=0.003", "ramp=0", *CHEAP),
    ],
    "resnet18": [of_resnet18(ALLREDUCE), of_resnet18(DEFAULT)],
    "groups": [DEFAULT, *(by(DEFAULT, workers) for workers in (8, 16, 32)), PAPER, by(PAPER, 16)],
    "published": [
        long(DEFAULT, 150),
        long(DEFAULT._replace(name="vgg16-ab-default", recipe="vgg16-cifar10"), 150),
        long(by(ALLREDUCE._replace(name="resized-allreduce", recipe=RESIZED), 1), 150),
    ],
    "length": [long(setting, epochs) for epochs in (20, 80) for setting in (DEFAULT, ALLREDUCE)],
}
