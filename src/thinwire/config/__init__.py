"""What a user may set: one frozen dataclass a method, checked once, at construction."""

from thinwire.config.daso import DASO
from thinwire.config.lowrank import AB, OIALR
from thinwire.config.peers import AllReduce, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK

__all__ = ["AB", "DASO", "OIALR", "AllReduce", "DiLoCo", "LocalSGD", "OneBit", "PowerSGD", "TopK"]
