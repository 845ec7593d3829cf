"""Language models on WikiText-2, by word."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch.optim import AdamW

from thinwire.config import Nesterov
from thinwire.experiments import data
from thinwire.recipes.sizes import checked
from thinwire.train.data import Text
from thinwire.train.models import Decoder
from thinwire.train.schedule import Cosine
from thinwire.train.task import PREDICT, MethodOverrides, Recipe


class GPT(Decoder):
    """GPT-2: tanh's GELU, and a head that is the embedding of tokens. 124.4 M parameters at a vocabulary of 50,257.

    No library's model replaces it: that of transformers returns an object instead of logits and holds every weight
    transposed, so neither checkpoints nor factors would be the same.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        block: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        sizes = {"vocabulary": vocabulary, "block": block, "width": width, "depth": depth, "heads": heads}
        super().__init__(**sizes, dropout=dropout, gelu="tanh")
        self.head.weight = self.tokens.weight
        with torch.no_grad():  # what 2 · depth branches add to the residual stream should not grow with the depth
            for name, parameter in self.named_parameters():
                if name.endswith(("attention.out.weight", "mlp.2.weight")):
                    parameter.div_((2 * depth) ** 0.5)


_TOKENS = 2_088_628
_CHEAP = {"warmup": 0.05, "warmup_wire": "lowrank:16"}


def gpt(**sizes: Any) -> Recipe:
    """A GPT of 13 M parameters, 8.5 M of them in word embeddings.

    The learning rate is the best of five for all-reduce on the validation part, and local SGD's settings are the best
    there for a twentieth of the bytes (`benchmarks/words`).
    """
    return _wikitext2(
        "gpt-wikitext2",
        "a GPT of 13 M parameters on WikiText-2 by word (perplexity per word)",
        {"block": 128, "width": 256, "depth": 6, "heads": 8, "dropout": 0.2, **sizes},
        lr=2e-3,
        epochs=10,
    )


def gpt_124m(**sizes: Any) -> Recipe:
    """GPT-2's smallest size; with this text's 33,278 words it has 111 M parameters, and 124 M with GPT-2's 50,257."""
    return _wikitext2(
        "gpt124m-wikitext2",
        "a GPT of GPT-2's smallest size on WikiText-2 by word (perplexity per word)",
        {"block": 256, "dropout": 0.2, **sizes},
        lr=6e-4,
        epochs=10,
    )


def _wikitext2(name: str, summary: str, sizes: dict[str, Any], *, lr: float, epochs: int) -> Recipe:
    checked(GPT, sizes, "vocabulary")
    batch = 64
    steps = round(epochs * _TOKENS / (batch * sizes["block"]))
    return Recipe(
        name=name,
        summary=summary,
        task=PREDICT,
        source=partial(data.words, block=sizes["block"]),
        model=lambda source: GPT(vocabulary=cast(Text, source).vocabulary, **sizes),
        optimizer=partial(AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
        steps=steps,
        epochs=epochs,
        epochs_are_passes=True,
        batch=batch,
        rate=Cosine(warmup=0.05),
        autocast=True,
        clip=1.0,
        eval_every=max(1, steps // 20),
        suited={
            "ab-paper": MethodOverrides({"merge": "trained"}),
            "oialr": MethodOverrides({"factor_at": 0.5, "layer_fraction": 0.25}),
            "localsgd": MethodOverrides({"every": 3, "wire": "int2", "second_moment": "shared", **_CHEAP}),
            "diloco": MethodOverrides({"every": 12, "outer": Nesterov(0.7, 0.5), "warmup": 0.05}),
            "powersgd": MethodOverrides({"rank": 16, "warmup": 0.05}),
            "topk": MethodOverrides({"density": 0.05, "ramp": 0.05}),
            "onebit": MethodOverrides({"warmup": 0.05}),
        },
    )
