"""CPU seconds of `thinwire plan` for models and layouts of the size people plan for.

    OMP_NUM_THREADS=1 python benchmarks/plan_seconds.py
    OMP_NUM_THREADS=1 python benchmarks/plan_seconds.py --models gpt2 --nodes 128 --methods all

Each plan is the whole command in a process of its own: start, building the model, all methods, the picture. Seconds are
those of its CPU time, user and system, so that a busy machine does not count.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, WORKERS_A_NODE = 10_000, 8


def gpt2() -> tuple:  # type: ignore[type-arg]
    """transformers' GPT-2 from its default config, 124 M parameters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), torch.zeros(1, 1024, dtype=torch.int64)


def resnet50() -> tuple:  # type: ignore[type-arg]
    """transformers' ResNet-50 from its default config."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), torch.zeros(2, 3, 224, 224)


def vit() -> tuple:  # type: ignore[type-arg]
    """transformers' ViT-B/16 from its default config."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000)), torch.zeros(2, 3, 224, 224)


MODELS = ("gpt2", "resnet50", "vit")


def cpu_seconds(model: str, nodes: int, methods: str | None) -> float:
    """One plan, as a user asks for it."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--model", f"{Path(__file__).resolve()}:{model}", "--steps", str(STEPS), "--compute", "180ms"]
        words += ["--workers", str(nodes * WORKERS_A_NODE), "--nodes", str(nodes), "--out", folder, "--quiet"]
        words += ["--methods", methods] if methods else []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", "from thinwire.cli import main; main()", "plan", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Plan and print, a line a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="by commas")
    parser.add_argument("--nodes", default="8,128", help="by commas")
    parser.add_argument("--methods", help="as thinwire plan takes them")
    given = parser.parse_args()
    for model in given.models.split(","):
        for nodes in map(int, given.nodes.split(",")):
            seconds = cpu_seconds(model, nodes, given.methods)
            print(f"{model}, {nodes} × {WORKERS_A_NODE} workers: {seconds:.1f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
