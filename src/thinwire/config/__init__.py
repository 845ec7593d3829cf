"""What a user may set: one frozen dataclass per method, checked once, at construction."""

from thinwire.config.ab import AB
from thinwire.config.ab_paper import PaperAB
from thinwire.config.daso import DASO
from thinwire.config.oialr import OIALR
from thinwire.config.outer import Nesterov, Radial
from thinwire.config.peers import AllReduce, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK

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
