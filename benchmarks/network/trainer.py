"""Hugging Face's Trainer over a slow link: its own DDP against Thinwire's methods, on two hosts with one worker each.

sudo python benchmarks/network/trainer.py TEXT                  takes a quarter of an hour at 100 Mbit/s
sudo python benchmarks/network/trainer.py TEXT --quick          to see that it runs

TEXT is a file, .gz or not, such as Tiny Shakespeare; a GPT-2 of 11 million parameters learns it by character. DDP takes
fewer steps than the others, in about the same time. Bytes are those that the kernel counted on the first host's
interface. Standard output has a table of method, steps, seconds, tokens per second, their ratio to DDP's, MB per step,
their ratio to DDP's, and loss on text that was held out; the file given by --json has all of the logs.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import thinwire
from thinwire.comm.backends import INTERFACE
from thinwire.comm.ledger import Interface
from thinwire.integrations.transformers import ThinwireTrainer
from thinwire.netbench.hosts import Hosts, parse_rate

PORT = 29519
BLOCK, BATCH = 128, 4
SIZES = {"n_embd": 384, "n_layer": 6, "n_head": 6}
SMALL = {"n_embd": 32, "n_layer": 1, "n_head": 2}


def main() -> None:
    given = parsed()
    found: dict[str, Any] = {}
    with Hosts(count=2, rate=parse_rate(given.rate), name="thinwiretrainer") as lab:
        for method in given.methods.split(","):
            steps = 40 if given.quick else given.steps if method == "ddp" else given.apart
            found[method] = launched(lab, given, method, steps)
            print(row(method, found[method], found["ddp"]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=60, help="of DDP")
    parser.add_argument("--apart", type=int, default=200, help="steps of the others, which take about as long")
    parser.add_argument("--methods", default="ddp,ab,localsgd")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def launched(lab: Hosts, given: argparse.Namespace, method: str, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, workers = Path(folder, "found.json"), []
        for number, host in enumerate(lab.hosts):
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            words += [f"--master-addr={lab.hosts[0].address}", f"--master-port={PORT}", "--nproc-per-node=1"]
            words += [__file__, str(given.text), "--worker", method, "--steps", str(steps), "--out", str(out)]
            words += ["--quick"] * given.quick
            environment = os.environ | {"GLOO_SOCKET_IFNAME": host.interface, INTERFACE: host.interface}
            environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
            workers.append(subprocess.Popen(host.command(words), env=environment, stdout=subprocess.DEVNULL))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            raise SystemExit(f"a worker of {method} failed")
        return json.loads(out.read_text())  # type: ignore[no-any-return]


def row(method: str, found: dict[str, Any], ddp: dict[str, Any]) -> str:
    speed, sent = found["tokens_per_second"], found["bytes_per_step"]
    return (
        f"| {method} | {found['steps']} | {found['seconds']:.0f} | {speed:,.0f} | "
        f"{speed / ddp['tokens_per_second']:.1f} | {sent / 1e6:.2f} | {sent / ddp['bytes_per_step']:.4f} | "
        f"{found['eval_loss']:.3f} |"
    )


# In a worker.


class Watch(TrainerCallback):
    """Seconds and bytes at each step."""

    def __init__(self) -> None:
        self.interface = Interface(os.environ[INTERFACE])
        self.seen: list[tuple[float, int]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.note()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.note()

    def note(self) -> None:
        self.seen.append((time.perf_counter(), self.interface.read().bytes))


def work(given: argparse.Namespace) -> None:
    raw = given.text.read_bytes()
    text = (gzip.decompress(raw) if given.text.suffix == ".gz" else raw).decode()
    characters = sorted(set(text))
    place = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([place[character] for character in text])
    blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
    data = [{"input_ids": block, "labels": block} for block in blocks]
    held = 200 if not given.quick else 8
    set_seed(0)
    sizes = SMALL if given.quick else SIZES
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(characters), n_positions=BLOCK, **sizes))
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=given.steps,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=16,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            warmup_steps=min(10, given.steps // 4),
            logging_steps=max(1, given.steps // 20),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_find_unused_parameters=False,
        )
        kinds: dict[str, Any] = {
            "ab": lambda steps: thinwire.AB(total_steps=steps, every=min(24, steps // 8)),
            "localsgd": thinwire.LocalSGD(every=8, wire="int4", warmup=4),
        }
        parts = {"train_dataset": data[held:], "eval_dataset": data[:held], "callbacks": [watch]}
        if given.worker == "ddp":
            trainer: Any = Trainer(model, arguments, **parts)
        else:
            trainer = ThinwireTrainer(model, arguments, **parts, thinwire=kinds[given.worker])
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            given.out.write_text(json.dumps(summary(given, trainer, watch, loss, model)))


def summary(given: argparse.Namespace, trainer: Any, watch: Watch, loss: float, model: Any) -> dict[str, Any]:
    (start, sent), (end, sent_then) = watch.seen[0], watch.seen[-1]
    return {
        "steps": given.steps,
        "seconds": end - start,
        "tokens_per_second": 2 * BATCH * BLOCK * given.steps / (end - start),
        "bytes_per_step": (sent_then - sent) / given.steps,
        "eval_loss": loss,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [(row["step"], row["loss"]) for row in trainer.state.log_history if "loss" in row],
        "seconds_at": [t - start for t, _ in watch.seen],
    }


if __name__ == "__main__":
    given = parsed()
    work(given) if given.worker else main()
