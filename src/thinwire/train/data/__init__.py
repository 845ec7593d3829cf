"""What recipes are trained on, and the batches a run takes from it."""

from thinwire.train.data.images import Images, digits
from thinwire.train.data.prefetcher import Prefetcher
from thinwire.train.data.source import SHIPPED, Batches, Source, for_validation, locate, share
from thinwire.train.data.text import Text, shakespeare

__all__ = [
    "SHIPPED",
    "Batches",
    "Images",
    "Prefetcher",
    "Source",
    "Text",
    "digits",
    "for_validation",
    "locate",
    "shakespeare",
    "share",
]
