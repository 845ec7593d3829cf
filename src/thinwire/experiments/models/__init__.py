"""The papers' models in plain PyTorch, but for the one of `experiments.text`."""

from thinwire.experiments.models import vision
from thinwire.experiments.models.autoformer import Autoformer
from thinwire.experiments.models.vision import VGG16, VGG16BN, ResNet18, ResNet50, ViT

__all__ = ["VGG16", "VGG16BN", "Autoformer", "ResNet18", "ResNet50", "ViT", "vision"]
