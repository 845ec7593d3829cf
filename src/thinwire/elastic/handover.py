"""A group that joins a run takes over all that a group in the run has, but for what is only that group's own."""

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from thinwire.checkpoint import loads
from thinwire.checkpoint.optimizer_files import put_state
from thinwire.checkpoint.tensors import apart, together
from thinwire.elastic.membership import Membership
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.base import Method
from thinwire.methods.context import Saved


def hand_over(method: Method, membership: Membership, votes: int) -> None:
    """Give groups that join what this run has come to; collective."""
    ranks = membership.donor_and_new
    packed = None
    if method.topology.rank == ranks[0]:
        packed = pack({"votes": votes, "method": method.state_dict()} | values_of(method))
    method.wire.broadcast_bytes(packed, ranks, "join")


def take_over(method: Method, membership: Membership) -> int:
    """In a group that joins: be what a group that is in the run is, with nothing left unsent; collective.

    Learning rates stay as they are: a scheduler brings them here from where it is itself. Returns the votes so far.
    """
    packed = method.wire.broadcast_bytes(None, membership.donor_and_new, "join")
    assert packed is not None, "this worker is not among those that take"
    whole = unpack(packed)
    local = whole["method"]["local"]
    local["gradients"]["buckets"] = []
    shared = _moved(whole["method"]["shared"], next(method.model.parameters()).device)
    method.load_state_dict(Saved(shared, [local], None, lambda: load_values(method, whole), stays=True))
    method.forwards = method.step
    return whole["votes"]


def values_of(method: Method) -> dict[str, Any]:
    """The model, and the optimizers' state."""
    states = [optimizer.state_dict()["state"] for optimizer in method.optimizers]
    return {
        "model": dict(method.model.state_dict()),
        "optimizers": [{str(i): state for i, state in found.items()} for found in states],
    }


def load_values(method: Method, whole: dict[str, Any]) -> None:
    """Load what `values_of` gave into a model and optimizers of the same shapes."""
    with loads.ignored():
        method.model.load_state_dict(whole["model"])
        for optimizer, found in zip(method.optimizers, whole["optimizers"], strict=True):
            parameters = Optimizers(optimizer).parameters
            for p in parameters:
                optimizer.state.pop(p, None)
            for i, state in found.items():
                for name, value in state.items():
                    p = parameters[int(i)]
                    put_state(optimizer, p, name, value if isinstance(value, Tensor) else _moved(value, p.device))


def pack(tree: Any) -> Tensor:
    """A tree of plain values and tensors as bytes, which hold no code."""
    plain, tensors = apart(tree)
    text = json.dumps(plain).encode()
    values = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + values), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """The tree again, on the CPU."""
    raw = packed.numpy().tobytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return together(json.loads(raw[8:end]), load(raw[end:]))


def _moved(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: _moved(value, device) for key, value in tree.items()}
    return [_moved(value, device) for value in tree] if isinstance(tree, list) else tree
