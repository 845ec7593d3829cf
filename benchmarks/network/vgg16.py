"""A VGG16-sized model for a few steps on noise: what it sends and how long that takes, not what it learns."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

sys.path.append(str(Path(__file__).parents[1]))
from models import give_decaying_spectra

from thinwire.experiments.models import VGG16BN
from thinwire.recipes import Recipe
from thinwire.train.task import CLASSIFY


class Noise:
    """Images of nothing."""

    train_size = 256
    heldout_size = 16

    def train(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images with these numbers."""
        g = torch.Generator().manual_seed(int(indices[0]))
        return torch.randn(len(indices), 3, 32, 32, generator=g), torch.as_tensor(indices % 10)

    heldout = train


def model(source: Noise) -> nn.Module:
    """VGG16-BN with spectra that decay as a trained model's do: a random one's are flat, and AB would cut nothing."""
    net = VGG16BN()
    give_decaying_spectra(net)
    return net


def vgg16() -> Recipe:
    """15.25 million parameters, 61 MB of gradients."""
    return Recipe(
        name="vgg16",
        summary="VGG16-BN on noise, for timing",
        task=CLASSIFY,
        source=lambda folder: Noise(),
        model=model,
        optimizer=partial(AdamW, lr=1e-4),
        steps=12,
        batch=32,
        clip=1.0,
        eval_every=12,
    )
