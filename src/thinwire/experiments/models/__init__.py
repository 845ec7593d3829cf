"""The papers' models in plain PyTorch, one family per file.

`library` returns a library's own model in place of ours where that library is installed.
"""

from thinwire.experiments.models import library
from thinwire.experiments.models.autoformer import Autoformer
from thinwire.experiments.models.gpt import GPT
from thinwire.experiments.models.resnet import ResNet18, ResNet50
from thinwire.experiments.models.vgg import VGG16, VGG16BN
from thinwire.experiments.models.vit import ViT

__all__ = ["GPT", "VGG16", "VGG16BN", "Autoformer", "ResNet18", "ResNet50", "ViT", "library"]
