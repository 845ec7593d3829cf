"""Thinwire trains a PyTorch model over a thin wire."""

from thinwire.config import AB, AllReduce
from thinwire.errors import ConfigError, DisagreementError, DivergedError, ThinwireError
from thinwire.replica import Replica, attach

__version__ = "0.1.0"

__all__ = [
    "AB",
    "AllReduce",
    "ConfigError",
    "DisagreementError",
    "DivergedError",
    "Replica",
    "ThinwireError",
    "attach",
]
