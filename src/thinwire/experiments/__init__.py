"""The papers' experiments: their models, data, augmentation and recipes.

Nothing else in the package imports this one; its recipes are found by name, as those of any other package are.
"""

from thinwire.experiments.cifar import mini_vit, mini_vit_tuned, resnet18, small_vit, vgg16, vgg16_bn
from thinwire.experiments.imagenet import resnet50_global, resnet50_local, vit_b16_global, vit_b16_local, vit_b16_oialr
from thinwire.experiments.series import autoformer, autoformer_tuned
from thinwire.experiments.text import gpt, gpt_124m

__all__ = [
    "autoformer",
    "autoformer_tuned",
    "gpt",
    "gpt_124m",
    "mini_vit",
    "mini_vit_tuned",
    "resnet18",
    "resnet50_global",
    "resnet50_local",
    "small_vit",
    "vgg16",
    "vgg16_bn",
    "vit_b16_global",
    "vit_b16_local",
    "vit_b16_oialr",
]
