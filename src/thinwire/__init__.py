"""Thinwire trains a PyTorch model over a thin wire."""

from typing import TYPE_CHECKING, Any

from thinwire.base.errors import ConfigError, DisagreementError, DivergedError, LostError, SaveError, ThinwireError
from thinwire.checkpoint.also import RandomState
from thinwire.config import Nesterov, Radial
from thinwire.config.faults import Faults
from thinwire.factor.stability import Stability
from thinwire.loggers import Log
from thinwire.methods import AB, DASO, OIALR, AllReduce, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK
from thinwire.methods.registry import register
from thinwire.replica.attaching import attach
from thinwire.replica.compress import Compressed, compress
from thinwire.replica.ema import EMA
from thinwire.replica.replica import Replica, stop_requested
from thinwire.replica.sampler import ElasticSampler

if TYPE_CHECKING:
    from thinwire.tuning.api import tune

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
    "ElasticSampler",
    "Faults",
    "LocalSGD",
    "Log",
    "LostError",
    "Nesterov",
    "OneBit",
    "PowerSGD",
    "Radial",
    "RandomState",
    "Replica",
    "SaveError",
    "Stability",
    "ThinwireError",
    "TopK",
    "attach",
    "compress",
    "register",
    "stop_requested",
    "tune",
]


def __getattr__(name: str) -> Any:
    """`tune` is loaded when it is used: it needs the parts of the command line, which a training loop does not."""
    if name == "tune":
        from thinwire.tuning.api import tune

        return tune
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
