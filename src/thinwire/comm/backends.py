"""Which backend carries tensors over which link, by which interface, and how nccl is kept from sending twice.

Inside a node tensors take what `torch.distributed` was started with: nccl for GPUs, gloo for CPUs. What spans nodes
takes the same, or `slow_backend`, in process groups of its own. nccl chooses among algorithms by speed, and some of
them send more: small messages take twice the bytes to arrive a little sooner, and a ring through all GPUs of two nodes
crosses nearly twice as often as a tree. Over a thin wire bytes are time, so these groups connect with other settings.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.base.errors import ConfigError, unknown

SLOW = "THINWIRE_SLOW_BACKEND"
INTERFACE = "THINWIRE_INTERFACE"
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BACKENDS = ("gloo", "nccl")
_BOTH = "cpu:gloo,cuda:nccl"
"""nccl is for GPUs alone."""

_ALGO, _PROTO = "NCCL_ALGO", "NCCL_PROTO"
_BY_FUNCTION = (2, 24)
"""The first nccl that takes an algorithm for each kind of collective; those before it apply one to all-reduces."""


def take_interface() -> None:
    """Let gloo and nccl use the interface that is watched, unless a variable of their own names another."""
    if name := os.environ.get(INTERFACE):
        for variable in SOCKETS:
            os.environ.setdefault(variable, name)


@dataclass(frozen=True)
class Backends:
    """Those of groups of workers: on one machine what `torch.distributed` was started with, and on several this."""

    between: str | None = None
    """None is the same."""
    device: torch.device | None = None
    within: str | None = None
    """What groups of workers on one machine have of their own, if it is not the world's."""

    def across(self, *, far: bool) -> str | None:
        """What torch calls those of a group of workers that are `far` from each other, on several machines, or not."""
        chosen = self.between if far else self.within
        return _BOTH if chosen == "nccl" else chosen

    @property
    def algorithm(self) -> str:
        """How all-reduces between machines are done: "ring" or "tree"."""
        trees = self.between == "nccl" and "tree" in os.environ.get(_ALGO, "tree").lower()
        return "tree" if trees else "ring"

    def connect(self, group: Any, *, far: bool) -> None:
        """Make nccl's connections of a group, those between machines with what suits a thin wire; collective in it.

        nccl reads these settings when it connects, at the first collective. What the user has set stays.
        """
        if (self.between if far else self.within) == "nccl":
            with _thin_settings() if far else nullcontext():
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)


def where_groups_may_be_lost(own: str, device: torch.device) -> Backends:
    """gloo between groups, since it notices who is lost; inside a group nccl, if the world's `own` backends have it."""
    by_nccl = device.type == "cuda" and "nccl" in own
    return Backends(device=device, within="nccl" if by_nccl else None)


def choose(slow_backend: str | None, device: torch.device) -> Backends:
    """What the user or the environment says, or the world's own; for tensors on this device."""
    where, chosen = "slow_backend", slow_backend
    if chosen is None:
        where, chosen = SLOW, os.environ.get(SLOW)
    if chosen is not None and chosen not in BACKENDS:
        raise unknown(where, chosen, BACKENDS)
    if not dist.is_initialized():
        return Backends()
    own = dist.distributed_c10d._get_default_group()._get_backend(device).name()
    if chosen == "nccl" != own:
        raise ConfigError(
            f"`{where}`='nccl', but torch.distributed carries tensors of this {device.type} by {own}: nccl needs a GPU "
            'for each worker, and "cpu:gloo,cuda:nccl" if your script calls init_process_group() itself'
        )
    chosen = chosen or own
    return Backends(between=chosen if "nccl" in (own, chosen) else None, device=device)


@contextmanager
def _thin_settings() -> Iterator[None]:
    trees = "ring;allreduce:tree" if torch.cuda.nccl.version() >= _BY_FUNCTION else "tree"
    added = {name: value for name, value in ((_ALGO, trees), (_PROTO, "Simple")) if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
