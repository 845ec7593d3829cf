"""Every run of docs/results.md, side by side on one GPU, in chains of pieces that share what they have in common.

    python benchmarks/papers/run.py --cifar DIR --text DIR --ett DIR --out OUT      # for one large GPU
    python benchmarks/papers/run.py … --only gpt,autoformer --quick                 # narrow, on a CPU
    python benchmarks/papers/tables.py OUT

Runs of VGG16 begin with one warm-up, which is AB's and all-reduce's alike (branch.py). The one with 134 M parameters
is trained by one worker wherever all workers would hold the same model, and by four where groups part: it has no
BatchNorm, so that is the same but for rounding, and spares the host half a gigabyte a step. Its bytes are planned.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from branch import branch

from thinwire.launch.jobs import Job

HERE = Path(__file__).parent
WORKERS = 4
NARROW = {
    "vgg16-cifar10": "vgg16",
    "vgg16bn-cifar10": "vgg16_bn",
    "gpt-wikitext2": "gpt",
    "autoformer-ettm2-96": "autoformer",
    "autoformer-ettm2-tuned": "autoformer",
    "minivit-cifar10": "mini_vit",
    "minivit-cifar10-tuned": "mini_vit",
}


class Bench:
    """Where runs go and what they are given."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.start = time.monotonic()

    def train(self, name: str, recipe: str, method: str, workers: int, *words: str) -> None:
        """One command, to its end."""
        data = {"cifar": self.given.cifar, "gpt": self.given.text, "auto": self.given.ett}
        folder = next(found for key, found in data.items() if key in recipe)
        place = ["--data", folder, "--out", self.given.out / name, "--workers", workers, "--seed", self.given.seed]
        command = ["run", self.recipe(recipe), "--method", method, *place, "--quiet", "--no-model", *words]
        self.say("begins", name, *words)
        threads = "1" if workers > 1 else "2"
        with (self.given.out / f"{name}.log").open("a") as log:
            ended = subprocess.run(
                [sys.executable, "-m", "thinwire.cli", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
        self.say("ended" if ended.returncode == 0 else "FAILED", name)
        ended.check_returncode()  # the next piece would go on from the wrong place

    def part(self, old: str, new: str, recipe: str, method: str, **fields: Any) -> None:
        """A run that begins where an old one stands."""
        job = Job(recipe=self.recipe(recipe), method=method, out=self.given.out / new, seed=self.given.seed, **fields)
        job.out.mkdir(parents=True, exist_ok=True)
        self.say("parts", new, "from", old, "at step", branch(self.given.out / old / "checkpoint", job))

    def recipe(self, name: str) -> str:
        """By name, or a narrow one."""
        return f"{HERE / 'narrow.py'}:{NARROW[name]}" if self.given.quick and name in NARROW else name

    def say(self, *words: Any) -> None:
        print(f"{time.monotonic() - self.start:7.0f} s  {' '.join(map(str, words))}\n", end="", flush=True)


def together(*chains: Callable[[], None]) -> None:
    """Side by side, until all have ended; what the first of them raised is raised then."""
    with ThreadPoolExecutor(len(chains)) as pool:
        running = [pool.submit(chain) for chain in chains]
    for chain in running:
        chain.result()


def vgg16(bench: Bench, recipe: str = "vgg16-cifar10", name: str = "vgg16") -> None:
    """All-reduce, AB with groups and without, by the table's counts; 134 M parameters."""
    epochs = bench.given.epochs
    warm, merged = _marks(bench, recipe)
    length: tuple[str, ...] = ("--epochs", str(epochs), "--eval-every", str(bench.given.eval_every))
    fields = {"epochs": epochs}
    bench.train(f"{name}-ab-paper", recipe, "ab-paper", 1, *length, "--until", str(warm))
    bench.part(f"{name}-ab-paper", f"{name}-allreduce", recipe, "allreduce", **fields)
    bench.part(f"{name}-ab-paper", f"{name}-ab-paper-world", recipe, "ab-paper", group_size="world", **fields)

    def groups() -> None:
        bench.train(f"{name}-ab-paper", recipe, "ab-paper", WORKERS, *length, "--resume", "--until", str(merged))
        bench.train(f"{name}-ab-paper", recipe, "ab-paper", 1, *length, "--resume")

    together(
        groups,
        lambda: bench.train(
            f"{name}-ab-paper-world", recipe, "ab-paper", 1, *length, "--resume", "--group-size", "world"
        ),
        lambda: bench.train(f"{name}-allreduce", recipe, "allreduce", 1, *length, "--resume"),
    )


def resized(bench: Bench) -> None:
    """The same with another augmentation."""
    vgg16(bench, f"{HERE / 'cifar_resized.py'}:vgg16", "resized")


def vgg16_bn(bench: Bench) -> None:
    """The same with BatchNorm and 15 M parameters, by four workers throughout; and AB by the guideline."""
    recipe, epochs = "vgg16bn-cifar10", bench.given.epochs
    warm, _ = _marks(bench, recipe)
    early = _warmup(bench, recipe, "schedule=guideline") - 4
    guideline = ("--set", "schedule=guideline")
    length: tuple[str, ...] = ("--epochs", str(epochs), "--eval-every", str(bench.given.eval_every))
    fields = {"epochs": epochs}

    def run(name: str, method: str, *words: str) -> None:
        bench.train(f"vgg16bn-{name}", recipe, method, WORKERS, *length, *words)

    run("ab-paper", "ab-paper", "--until", str(early))
    bench.part(
        "vgg16bn-ab-paper", "vgg16bn-ab-paper-guideline", recipe, "ab-paper", settings=("schedule=guideline",), **fields
    )

    def by_table() -> None:
        run("ab-paper", "ab-paper", "--resume", "--until", str(warm))
        bench.part("vgg16bn-ab-paper", "vgg16bn-allreduce", recipe, "allreduce", **fields)
        bench.part("vgg16bn-ab-paper", "vgg16bn-ab-paper-world", recipe, "ab-paper", group_size="world", **fields)
        together(
            lambda: run("ab-paper", "ab-paper", "--resume"),
            lambda: run("ab-paper-world", "ab-paper", "--resume", "--group-size", "world"),
            lambda: run("allreduce", "allreduce", "--resume"),
        )

    together(by_table, lambda: run("ab-paper-guideline", "ab-paper", "--resume", *guideline))


def gpt(bench: Bench) -> None:
    """A GPT on WikiText-2 by three methods, local SGD in its plain form."""
    plain = ("every=8", "wire=fp32", "second_moment=group", "warmup_wire=fp32")
    fields = {"allreduce": (), "localsgd": plain, "ab-paper": ()}

    def train(method: str) -> None:
        words = [word for field in fields[method] for word in ("--set", field)]
        bench.train(f"gpt-{method}", "gpt-wikitext2", method, WORKERS, *words)

    together(*(partial(train, method) for method in fields))


def autoformer(bench: Bench) -> None:
    """96 steps ahead, seed after seed."""

    def seeds(name: str, method: str, *words: str, recipe: str = "autoformer-ettm2-96", most: int = 99) -> None:
        for seed in range(min(most, bench.given.seeds)):
            bench.train(f"autoformer-{name}-seed{seed}", recipe, method, 1, "--seed", str(seed), *words)

    together(
        lambda: seeds("allreduce", "allreduce"),
        lambda: seeds("oialr", "oialr"),
        lambda: seeds("oialr-plain", "oialr", "--set", "match_rate=false"),
        lambda: seeds("oialr-tuned", "oialr", recipe="autoformer-ettm2-tuned", most=1),
    )


def mini_vit(bench: Bench) -> None:
    """Table 4.3: all-reduce, OIALR with its rates, and with those that the published search found."""
    length = () if bench.given.quick else ("--eval-every", "1465")

    def train(name: str, method: str, recipe: str = "minivit-cifar10") -> None:
        bench.train(f"minivit-{name}", recipe, method, 1, *length)

    together(
        lambda: train("allreduce", "allreduce"),
        lambda: train("oialr", "oialr"),
        lambda: train("oialr-tuned", "oialr", "minivit-cifar10-tuned"),
    )


def _marks(bench: Bench, recipe: str) -> tuple[int, int]:
    """A step shortly before the first decomposition, and one after the last merge."""
    job = Job(recipe=bench.recipe(recipe), method="ab-paper", out=Path(), epochs=bench.given.epochs)
    config = job.config
    cycle = config.group_length + config.rebound_length
    cycles = (job.trained.steps - config.warmup_length - config.group_length) // cycle + 1
    return config.warmup_length - 4, min(job.trained.steps - 1, config.warmup_length + cycles * cycle + 2)


def _warmup(bench: Bench, recipe: str, *settings: str) -> int:
    job = Job(recipe=bench.recipe(recipe), method="ab-paper", out=Path(), epochs=bench.given.epochs, settings=settings)
    return job.config.warmup_length


CHAINS = {
    "vgg16": vgg16,
    "vgg16bn": vgg16_bn,
    "gpt": gpt,
    "autoformer": autoformer,
    "resized": resized,
    "minivit": mini_vit,
}


def main() -> None:
    """All of them, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cifar", "text", "ett", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--only", default="vgg16,vgg16bn,gpt,autoformer", help="of " + ", ".join(CHAINS))
    parser.add_argument("--epochs", type=int, default=150, help="of VGG16")
    parser.add_argument("--eval-every", type=int, default=244, help="steps of VGG16")
    parser.add_argument("--seed", type=int, default=0, help="of VGG16 and the GPT")
    parser.add_argument("--seeds", type=int, default=3, help="of Autoformer, from 0")
    parser.add_argument("--quick", action="store_true", help="narrow models, to see that it runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(given)
    together(*(lambda chain=CHAINS[name]: chain(bench) for name in given.only.split(",")))


if __name__ == "__main__":
    main()
