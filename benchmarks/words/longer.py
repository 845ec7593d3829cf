"""A longer run of a larger model: a GPT of 29 M on pieces of WikiText-2 (see pieces.py), 10,000 steps."""

from functools import partial
from typing import cast

from torch.optim import AdamW

from thinwire.experiments import data, text
from thinwire.recipes import Recipe
from thinwire.train.data import Text
from thinwire.train.schedule import Cosine
from thinwire.train.task import PREDICT

BLOCK = 128


def gpt(steps: int = 10_000) -> Recipe:
    """8 layers of width 512; dropout 0.3, since it reads the text 28 times."""
    return Recipe(
        name="gpt-pieces",
        summary="a GPT of 29 M parameters on pieces of WikiText-2 (perplexity per piece)",
        task=PREDICT,
        source=partial(data.words, block=BLOCK),
        model=lambda source: text.GPT(
            vocabulary=cast(Text, source).vocabulary, block=BLOCK, width=512, depth=8, heads=8, dropout=0.3
        ),
        optimizer=partial(AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        steps=steps,
        batch=64,
        rate=Cosine(warmup=0.05),
        autocast=True,
        clip=1.0,
        eval_every=max(1, steps // 10),
    )
