"""The papers' data sets."""

from thinwire.experiments.data.cifar import cifar10, cifar100
from thinwire.experiments.data.image_folder import Folder, image_folder
from thinwire.experiments.data.series import Series, ett
from thinwire.experiments.data.text import by_bytes, words

__all__ = ["Folder", "Series", "by_bytes", "cifar10", "cifar100", "ett", "image_folder", "words"]
