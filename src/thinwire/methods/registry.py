"""Every method there is, by the name users type."""

from typing import Any, NamedTuple

from thinwire import config
from thinwire.errors import ConfigError
from thinwire.methods.ab import ABMethod
from thinwire.methods.allreduce import AllReduceMethod
from thinwire.methods.base import Ground, Method
from thinwire.methods.daso import DASOMethod
from thinwire.methods.diloco import DiLoCoMethod
from thinwire.methods.local_sgd import LocalSGDMethod
from thinwire.methods.oialr import OIALRMethod
from thinwire.methods.onebit import OneBitMethod
from thinwire.methods.powersgd import PowerSGDMethod
from thinwire.methods.topk import TopKMethod


class Entry(NamedTuple):
    """A method: its config, its class, and one line for `thinwire list`."""

    config: type
    method: type[Method]
    summary: str


METHODS: dict[str, Entry] = {
    "allreduce": Entry(config.AllReduce, AllReduceMethod, "gradients averaged at every step (PyTorch's DDP)"),
    "ab": Entry(config.AB, ABMethod, "groups train low-rank factors alone and merge (AB training)"),
    "oialr": Entry(
        config.OIALR, OIALRMethod, "bases frozen once stable, the small matrix between them trained (OIALR)"
    ),
    "daso": Entry(
        config.DASO, DASOMethod, "gradients inside the node, parameters between nodes while training goes on"
    ),
    "localsgd": Entry(config.LocalSGD, LocalSGDMethod, "groups train alone and average parameters now and then"),
    "diloco": Entry(config.DiLoCo, DiLoCoMethod, "groups train alone; outer Nesterov steps by how far they came"),
    "powersgd": Entry(config.PowerSGD, PowerSGDMethod, "gradients as low-rank products, with error feedback"),
    "topk": Entry(config.TopK, TopKMethod, "only the largest accumulated gradients (Deep Gradient Compression)"),
    "onebit": Entry(config.OneBit, OneBitMethod, "a bit an element of the gradient, with error feedback (1-bit SGD)"),
}


def name_of(given: Any) -> str:
    """The name of the method that a config belongs to."""
    for name, entry in METHODS.items():
        if type(given) is entry.config:
            return name
    known = ", ".join(entry.config.__name__ for entry in METHODS.values())
    raise ConfigError(f"{given!r} is not the config of a method, choose from: {known}")


def make(given: Any, ground: Ground) -> Method:
    """The method that a config asks for."""
    return METHODS[name_of(given)].method(given, ground)
