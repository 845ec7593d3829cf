"""VGG16 on CIFAR-10 with crops that are stretched, as timm's defaults have them: perhaps what was published with.

thinwire run benchmarks/papers/cifar_resized.py:vgg16 --data DIR --method ab-paper --workers 4
"""

from typing import Any

from thinwire import experiments
from thinwire.experiments.augmentation import CIFAR10, Pictures
from thinwire.recipes import Recipe


def vgg16(**sizes: Any) -> Recipe:
    return experiments.vgg16(**sizes).replace(
        name="vgg16-cifar10-resized", transform=Pictures(statistics=CIFAR10, scale=(0.08, 1.0))
    )
