"""What recipes are trained on, and the batches a run takes from it."""

from thinwire.train.data import text
from thinwire.train.data.ahead import Ahead
from thinwire.train.data.cifar import cifar10, cifar100
from thinwire.train.data.folder import Folder, image_folder
from thinwire.train.data.images import Images, digits
from thinwire.train.data.series import Series, ett
from thinwire.train.data.source import SHIPPED, Batches, Source, locate, share
from thinwire.train.data.text import Text, shakespeare

__all__ = [
    "SHIPPED",
    "Ahead",
    "Batches",
    "Folder",
    "Images",
    "Series",
    "Source",
    "Text",
    "cifar10",
    "cifar100",
    "digits",
    "ett",
    "image_folder",
    "locate",
    "shakespeare",
    "share",
    "text",
]
