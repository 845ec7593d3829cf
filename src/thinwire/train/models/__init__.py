"""The models that recipes train, one family a file, in plain PyTorch.

`library` gives a library's own model in place of ours where it is installed, `initial` gives first values.
"""

from thinwire.train.models import initial, library
from thinwire.train.models.autoformer import Autoformer
from thinwire.train.models.digits import DigitNet
from thinwire.train.models.gpt import GPT, CharGPT
from thinwire.train.models.resnet import ResNet50
from thinwire.train.models.vgg import VGG16, VGG16BN
from thinwire.train.models.vit import ViT

__all__ = ["GPT", "VGG16", "VGG16BN", "Autoformer", "CharGPT", "DigitNet", "ResNet50", "ViT", "initial", "library"]
