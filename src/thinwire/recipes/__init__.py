"""Whole experiments, each a function that returns a `Recipe`."""

from thinwire.recipes.cifar import mini_vit, mini_vit_tuned, small_vit, vgg16, vgg16_bn
from thinwire.recipes.imagenet import resnet50_global, resnet50_local, vit_b16_global, vit_b16_local, vit_b16_oialr
from thinwire.recipes.names import RECIPES, call_function, load_function, named
from thinwire.recipes.series import autoformer, autoformer_tuned
from thinwire.recipes.sizes import model_without_values
from thinwire.recipes.small import digits, shakespeare
from thinwire.recipes.text import gpt, gpt_124m
from thinwire.train.task import Recipe, Suited

__all__ = [
    "RECIPES",
    "Recipe",
    "Suited",
    "autoformer",
    "autoformer_tuned",
    "call_function",
    "digits",
    "gpt",
    "gpt_124m",
    "load_function",
    "mini_vit",
    "mini_vit_tuned",
    "model_without_values",
    "named",
    "resnet50_global",
    "resnet50_local",
    "shakespeare",
    "small_vit",
    "vgg16",
    "vgg16_bn",
    "vit_b16_global",
    "vit_b16_local",
    "vit_b16_oialr",
]
