"""What a user may set: one frozen dataclass per method, checked once, at construction."""

from thinwire.config.daso import DASO
from thinwire.config.lowrank import AB, OIALR
from thinwire.config.outer import Nesterov
from thinwire.config.peers import AllReduce, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK

__all__ = ["AB", "DASO", "OIALR", "AllReduce", "DiLoCo", "LocalSGD", "Nesterov", "OneBit", "PowerSGD", "TopK"]
