"""Thinwire trains a PyTorch model over a thin wire."""

from thinwire.attaching import attach
from thinwire.compress import Compressed, compress
from thinwire.config import AB, DASO, OIALR, AllReduce, DiLoCo, LocalSGD, Nesterov, OneBit, PowerSGD, Radial, TopK
from thinwire.config.faults import Faults
from thinwire.ema import EMA
from thinwire.errors import ConfigError, DisagreementError, DivergedError, SaveError, ThinwireError
from thinwire.factor.stability import Stability
from thinwire.methods.base import Method
from thinwire.methods.registry import register
from thinwire.replica import Replica
from thinwire.stopping import stop_requested

__version__ = "0.1.0"

__all__ = [
    "AB",
    "DASO",
    "EMA",
    "OIALR",
    "AllReduce",
    "Compressed",
    "ConfigError",
    "DiLoCo",
    "DisagreementError",
    "DivergedError",
    "Faults",
    "LocalSGD",
    "Method",
    "Nesterov",
    "OneBit",
    "PowerSGD",
    "Radial",
    "Replica",
    "SaveError",
    "Stability",
    "ThinwireError",
    "TopK",
    "attach",
    "compress",
    "register",
    "stop_requested",
]
