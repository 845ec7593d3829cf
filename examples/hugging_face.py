"""Hugging Face's Trainer over a thin wire: a GPT-2 learns Python's own documentation, character by character.

    pip install "thinwire[hf]"
    torchrun --nproc-per-node 2 examples/hugging_face.py

One class and one argument are Thinwire's. Two workers on this machine stand for two nodes.
"""

import argparse
import pydoc
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import thinwire
from thinwire.integrations.transformers import ThinwireTrainer

BLOCK = 64


def texts() -> tuple[list[dict[str, torch.Tensor]], int]:
    """Pieces of what `help()` says about some modules, as numbers; and how many different ones there are."""
    text = "".join(pydoc.plain(pydoc.render_doc(name)) for name in ("argparse", "logging", "pathlib", "threading"))
    characters = sorted(set(text))
    ids = torch.tensor([characters.index(character) for character in text])
    blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
    return [{"input_ids": block, "labels": block} for block in blocks], len(characters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    data, vocabulary = texts()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=max(1, steps // 5),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ThinwireTrainer(
            model,
            arguments,
            train_dataset=data,
            thinwire=lambda length: thinwire.AB(total_steps=length, warmup=0.1, every=8, cutoff=0.2),
        )
        trainer.train()


if __name__ == "__main__":
    main()
