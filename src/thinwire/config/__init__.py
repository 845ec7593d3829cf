"""What a user may set: one frozen dataclass per method, checked once, at construction."""

from thinwire.config.ab import AB, PaperAB
from thinwire.config.common import Nesterov, Radial
from thinwire.config.methods import DASO, OIALR, AllReduce, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK

__all__ = [
    "AB",
    "DASO",
    "OIALR",
    "AllReduce",
    "DiLoCo",
    "LocalSGD",
    "Nesterov",
    "OneBit",
    "PaperAB",
    "PowerSGD",
    "Radial",
    "TopK",
]
