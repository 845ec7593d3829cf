"""The optimizers of one model: look up state, and replace parameters in their groups.

Most models have one optimizer. Some have several, such as Muon for hidden matrices and AdamW for everything else; each
trained parameter is then in exactly one of them.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

State = dict[str, Any]


class Optimizers(Sequence[Optimizer]):
    """One or several optimizers that together train a model."""

    def __init__(self, *each: Optimizer, wrappers: Sequence[Any] = ()) -> None:
        self.each = each
        self.wrappers = [wrapper for wrapper in wrappers if isinstance(wrapper, Optimizer)]
        """Optimizers around them that keep state of the same parameters, as SAM does."""
        self.replaced: list[weakref.ref[nn.Parameter]] = []
        """Parameters that were given up for others, and that nothing should hold any more."""

    def __len__(self) -> int:
        return len(self.each)

    @overload
    def __getitem__(self, index: int) -> Optimizer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Optimizer, ...]: ...
    def __getitem__(self, index: int | slice) -> Optimizer | tuple[Optimizer, ...]:
        return self.each[index]

    @property
    def groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """Every parameter group, with its optimizer."""
        return [(optimizer, group) for optimizer in self.each for group in optimizer.param_groups]

    @property
    def rates(self) -> list[float]:
        """The learning rate of every parameter group; 0 where an optimizer finds its own, as Adafactor may."""
        return [0.0 if (rate := group.get("lr")) is None else float(rate) for _, group in self.groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter they hold."""
        return [p for _, group in self.groups for p in group["params"]]

    def of(self, parameter: nn.Parameter) -> Optimizer | None:
        """The optimizer that holds a parameter."""
        found = (o for o, group in self.groups if any(p is parameter for p in group["params"]))
        return next(found, None)

    def name(self, optimizer: Optimizer) -> str:
        """A name for error messages."""
        kind = type(optimizer).__name__
        place = next(i for i, each in enumerate(self.each) if each is optimizer)
        return kind if len(self) == 1 else f"{kind} (optimizer {place})"

    def state_of(self, parameter: nn.Parameter) -> State:
        """A parameter's state; empty before its first step."""
        # `state[parameter]` would create an entry.
        return next((o.state[parameter] for o in self.each if parameter in o.state), {})

    def set_state(self, parameter: nn.Parameter, state: State) -> None:
        """Set a parameter's state in the optimizer that holds it."""
        optimizer = self.of(parameter)
        assert optimizer is not None, "no optimizer holds this parameter"
        optimizer.state[parameter] = state

    def reset(self, parameters: Sequence[nn.Parameter]) -> None:
        """Reset the state of these parameters; they start again from step 0."""
        for p in parameters:
            for optimizer in self.each:
                optimizer.state.pop(p, None)
                if first := _first_state(optimizer, p):
                    optimizer.state[p] = first
        self._count_again()

    def _count_again(self) -> None:
        """Steps that are counted by group, which some packages do, start again when all state of the group does."""
        for optimizer, group in self.groups:
            if isinstance(group.get("step"), int) and not any(optimizer.state.get(p) for p in group["params"]):
                group["step"] = 0

    @property
    def switching(self) -> list[Any]:
        """Those that train one set of weights and evaluate another, as Schedule-Free does."""
        return [o for o in self.each if callable(getattr(o, "train", None)) and callable(getattr(o, "eval", None))]

    @property
    def evaluating(self) -> list[Any]:
        """Those of them that hold the weights to evaluate now."""
        return [o for o in self.switching if not all(group.get("train_mode", True) for group in o.param_groups)]

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Hold the weights to evaluate for a while; those that are trained come back bit for bit."""
        given = [o for o in self.switching if o not in self.evaluating]
        before = [(p, p.detach().clone()) for o in given for p in Optimizers(o).parameters]
        for optimizer in given:
            optimizer.eval()
        try:
            yield
        finally:
            for optimizer in given:
                optimizer.train()
            with torch.no_grad():
                for p, value in before:
                    p.copy_(value)

    def exchange(self, old: Sequence[nn.Parameter], new: Sequence[nn.Parameter], suffixes: Sequence[str] = ()) -> None:
        """Replace `old` by `new` in the same parameter group; the state of the old ones is dropped.

        Where a group has names, `suffixes` are appended to the weight's name, one per factor; none for a full weight.
        """
        gone = {id(p) for p in old}
        self.replaced += [weakref.ref(p) for p in old]
        for _, group in self.groups:
            places = [i for i, p in enumerate(group["params"]) if id(p) in gone]
            if places:
                _put(group["params"], places, list(new))
                if "param_names" in group:
                    _put(group["param_names"], places, _names(group["param_names"][places[0]], suffixes))
                break
        for p in old:
            for optimizer in (*self.each, *self.wrappers):
                optimizer.state.pop(p, None)
        self.reset(new)


def _put(values: list[Any], places: Sequence[int], new: list[Any]) -> None:
    """Remove the values at `places`, and insert `new` at the first of them."""
    kept = [value for i, value in enumerate(values) if i not in places]
    values[:] = [*kept[: places[0]], *new, *kept[places[0] :]]


def _names(old: str, suffixes: Sequence[str]) -> list[str]:
    weight = old.removesuffix("_a").removesuffix("_s")
    return [f"{weight}_{suffix}" for suffix in suffixes] or [weight]


def _first_state(optimizer: Optimizer, p: nn.Parameter) -> State:
    """State that the constructor creates: none, except for Adagrad in older versions of torch."""
    if not isinstance(optimizer, torch.optim.Adagrad) or Optimizers(optimizer).of(p) is None:
        return {}
    return dict(type(optimizer)([p], **optimizer.defaults).state.get(p, {}))
