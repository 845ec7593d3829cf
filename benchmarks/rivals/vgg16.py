"""VGG16-BN on CIFAR-10 by every method: a small search on a tenth of the training images, or the table.

python benchmarks/rivals/vgg16.py search --data DIR --out DIR --epochs 8 --parallel 6
python benchmarks/rivals/vgg16.py table --data DIR --out DIR --epochs 30 --seeds 0 1 --parallel 6

Every run is one of `benchmarks/vgg16_cifar10.py` with four workers; runs that are in OUT already are not repeated.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

RUN = Path(__file__).resolve().parents[1] / "vgg16_cifar10.py"

# Words of a command line each.
SEARCH = [
    "allreduce",
    "allreduce --optimizer sgd --lr 0.1",
    "allreduce --optimizer sgd --lr 0.3",
    *(f"powersgd --set rank={r} start_step={s}" for r, s in product((4, 16), (0, 0.05))),
    *(f"localsgd --set every={h} warmup=0.05" for h in (24, 96)),
    *(
        f"diloco --set every={h} outer_lr={lr} outer_momentum={m} warmup=0.05"
        for h, lr, m in ((24, 0.7, 0.9), (24, 0.4, 0.9), (24, 0.7, 0.5), (24, 1.0, 0.5), (48, 0.7, 0.5))
    ),
    *(f"topk --set density={d} warmup=0.1" for d in (0.001, 0.01)),
    *(
        f"topk --optimizer sgd --lr {lr} --set density={d} warmup=0.1"
        for lr, d in ((0.1, 0.001), (0.3, 0.001), (0.1, 0.01))
    ),
    "onebit --set warmup=0.05",
    "onebit --optimizer sgd --lr 0.1 --set warmup=0.05",
    "onebit --optimizer sgd --lr 0.3 --set warmup=0.05",
    # What the first part left open.
    "powersgd --optimizer sgd --lr 0.1 --set rank=4",
    "powersgd --optimizer sgd --lr 0.3 --set rank=4",
    "localsgd --optimizer sgd --lr 0.3 --set every=24 warmup=0.05",
    "topk --optimizer sgd --lr 0.3 --set density=0.01 warmup=0.1",
    "topk --optimizer sgd --lr 0.1 --set density=0.01 warmup=0.1 clip=none",
    "topk --optimizer sgd --lr 0.1 --set density=0.001 warmup=0.1 clip=none",
    "onebit --optimizer sgd --lr 0.03 --set warmup=0.05",
    "onebit --lr 0.0005 --set warmup=0.05",
]
TABLE = [
    "allreduce",
    "allreduce --set wire=bf16",
    "allreduce --set wire=int8",
    "ab --set merge=trained",
    "powersgd --set rank=16",
    "localsgd --set every=24 warmup=0.05",
    "diloco --set every=24 outer_lr=1.0 outer_momentum=0.5 warmup=0.05",
    "daso",
    "daso --set warmup_epochs=1 cooldown_epochs=1 plateau_patience=none compensate=true",
    "allreduce --optimizer sgd --lr 0.3",
    "powersgd --optimizer sgd --lr 0.1 --set rank=4",
    "topk --optimizer sgd --lr 0.3 --set density=0.01 warmup=0.1",
    "onebit --optimizer sgd --lr 0.1 --set warmup=0.05",
]


def main() -> None:
    """All runs of one list."""
    given = _arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in {"search": SEARCH, "table": TABLE}[given.what] if re.search(given.only, line)]
    jobs = [(line, seed) for seed in given.seeds for line in lines]
    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(lambda job: _run(given, *job), jobs))
    for line in lines:
        _tell(given, line)


def _run(given: argparse.Namespace, line: str, seed: int) -> None:
    result = _result(given, line, seed)
    if result.is_file():
        return
    start = time.perf_counter()
    own = ["--data", given.data, "--epochs", given.epochs, "--seed", seed, "--json", result]
    own += ["--samples", given.samples] if given.samples else []
    own += ["--validate"] if given.what == "search" else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", given.workers, RUN]
    words = [*launcher, "--method", *line.split(), *own]
    done = subprocess.run(
        [str(word) for word in words], env={"OMP_NUM_THREADS": "1", **os.environ}, capture_output=True, text=True
    )
    if not result.is_file():
        result.with_suffix(".err").write_text(done.stdout[-4000:] + done.stderr[-8000:])
    print(f"{line} seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)


def _result(given: argparse.Namespace, line: str, seed: int) -> Path:
    name = line.replace(" --set", "").replace("--optimizer ", "").replace("--lr ", "").replace(" ", "-")
    return given.out / f"{given.what}-{name}-seed{seed}.json"


def _tell(given: argparse.Namespace, line: str) -> None:
    files = [file for seed in given.seeds if (file := _result(given, line, seed)).is_file()]
    found = [json.loads(file.read_text()) for file in files]
    if not found:
        print(f"{line}: failed")
        return
    figures = " ".join(f"{100 * f['accuracy']:.2f}" for f in found)
    sent, size = fmean(f["traffic_vs_allreduce_fp32"] for f in found), fmean(f["compression"] for f in found)
    print(f"{line}: {figures} %, {sent:.4f} of the bytes, {size:.2f} : 1, {fmean(f['seconds'] for f in found):.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "table"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", default="", help="a pattern of runs, such as topk.*sgd")
    parser.add_argument("--samples", type=int, help="only so many images, to try it out")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    return parser.parse_args()


if __name__ == "__main__":
    main()
