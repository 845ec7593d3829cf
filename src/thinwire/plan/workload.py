"""What a plan is made for, from a recipe or a user's function: a model, what a run needs of it, what a pass shows."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map_only

from thinwire.base.errors import ConfigError, unknown
from thinwire.factor.convert import OrderOfUse
from thinwire.factor.layers import factored_names, factors_of, mark_as_read, weight_was_read
from thinwire.methods.registry import name_of
from thinwire.plan.shapes_only import NoInitialValues
from thinwire.recipes import Recipe, call_model, model_without_values
from thinwire.train.batcher import Batcher
from thinwire.train.data import check_share

# A shape that no optimizer's state has for any other reason.
_PROBE = torch.Size((2, 3))


class Pass(NamedTuple):
    """What a forward pass shows that does not depend on values."""

    order: tuple[str, ...]
    """Modules with weights, by name, as they were called."""
    read: tuple[str, ...]
    """Factored modules whose weight was read by others."""


Shape = tuple[tuple[str, str, int], ...]
"""Module, weight and number of factors of every weight that is factored."""


@dataclass
class Blank:
    """A model without values, its copies and its passes: these cost more than anything else in a plan."""

    model: nn.Module | None = None
    spare: list[nn.Module] = field(default_factory=list)
    """Copies not in use."""
    passes: dict[Shape, Pass] = field(default_factory=dict)


@dataclass(kw_only=True)
class Workload:
    """What a plan is made for."""

    name: str
    model: nn.Module
    """On the CPU with initial values, or on the meta device without; never changed."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    """Builds the optimizer."""
    steps: int
    """Optimizer steps of the run."""
    rate: Callable[[int], float] | None = None
    """The learning rate at a step, counted from 0, as a multiple of the optimizer's; None if unknown."""
    values: Callable[[], nn.Module] | None = None
    """Builds the model with initial values, to time a step, where `model` may have none."""
    inputs: tuple[Any, ...] = ()
    """A worker's batch, as positional arguments; empty if unknown."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """The same as keyword arguments."""
    loss: Callable[[Any], Tensor] | None = None
    """The loss of the model's outputs."""
    clip: float | None = None
    """Largest gradient norm."""
    recipe: str | None = None
    """The recipe it comes from."""
    eval_every: int | None = None
    """Steps between evaluations; None for a run without them."""
    epochs: int = 30
    """Epochs of a run, for methods that use them."""
    suited: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other fields for single methods, by name: `optimizer`, `rate`."""
    blank: Blank = field(default_factory=Blank, repr=False)
    """The model without values, for any optimizer."""

    def suited_to(self, config: Any) -> "Workload":
        """The same with the optimizer and the learning rates of this config's method."""
        own = self.suited.get(name_of(config))
        return replace(self, **own) if own else self

    @cached_property
    def with_values(self) -> nn.Module:
        """The model on the CPU with initial values."""
        return self.model if self.values is None else self.values()

    @property
    def without_values(self) -> nn.Module:
        """The model on the meta device; unlike with `model.to("meta")`, tied weights stay tied."""
        if self.blank.model is None:
            self.blank.model = copy_with(self.model, lambda name, t: t.to("meta"))
        return self.blank.model

    @contextmanager
    def borrowed(self) -> Iterator[nn.Module]:
        """A copy of the model without values, reused if none of its tensors was replaced."""
        model = self.blank.spare.pop() if self.blank.spare else copy.deepcopy(self.without_values)
        before = _tensors(model)
        yield model
        if _tensors(model) == before and not any(factored_names(module) for module in model.modules()):
            model.__dict__.pop("forward", None)
            for p in model.parameters():
                p.grad = None
            self.blank.spare.append(model)

    def show(self, model: nn.Module, usage: OrderOfUse | None) -> None:
        """A forward pass on the meta device, or the recorded effects of one in the same shape."""
        shape = _shape(model)
        seen = self.blank.passes.get(shape)
        if seen is None:
            seen = self._watched(model)
            if seen is not None:
                self.blank.passes[shape] = seen
            return
        for name in seen.read:
            mark_as_read(model.get_submodule(name))
        if usage is not None and usage.is_watching:
            usage.order += [name for name in seen.order if name not in usage.order]

    def _watched(self, model: nn.Module) -> "Pass | None":
        """Run the pass; None if it replaces tensors of the model, so that it must be run every time."""
        before, usage = _tensors(model), OrderOfUse(model)
        usage.watch()
        try:
            with torch.no_grad():
                self.call(model.train(), torch.device("meta"))
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be called without values ({type(error).__name__}: {error}); "
                "plan it without inputs, and give its seconds with --compute"
            ) from error
        finally:
            usage.stop()
        read = tuple(name for name, module in model.named_modules() if weight_was_read(module))
        return Pass(tuple(usage.order), read) if _tensors(model) == before else None

    @cached_property
    def state(self) -> dict[str, Tensor | Any]:
        """What the optimizer keeps for a parameter, found with a small one."""
        probe = nn.Parameter(torch.zeros(_PROBE))
        optimizer = self.optimizer([probe])
        probe.grad = torch.ones_like(probe)
        optimizer.step()
        return dict(optimizer.state[probe])

    def call(self, model: nn.Module, device: torch.device) -> Any:
        """A forward pass of one worker's batch."""
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), (self.inputs, self.keywords))
        return model(*args, **kwargs)

    @property
    def has_inputs(self) -> bool:
        """Whether it can be called."""
        return bool(self.inputs or self.keywords)


def state_like(value: Any, parameter: nn.Parameter) -> Any:
    """The same state for another parameter: one value per element, or a copy."""
    if isinstance(value, Tensor):
        if value.shape != _PROBE:
            return value.clone()
        form = parameter.shape, parameter.stride()  # empty_like takes ten times as long without values
        return torch.empty_strided(*form, dtype=parameter.dtype, device=parameter.device)
    return value


def _tensors(model: nn.Module) -> list[tuple[str, int, bool]]:
    """Which tensors a model holds, and which are trained."""
    return [(name, id(t), t.requires_grad) for name, t in (*model.named_parameters(), *model.named_buffers())]


def _shape(model: nn.Module) -> Shape:
    return tuple(
        (name, weight, len(factors_of(module, weight)))
        for name, module in model.named_modules()
        for weight in factored_names(module)
    )


def copy_with(model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy with changed parameters and buffers; tied ones stay tied."""
    changed: dict[int, Any] = {}
    for name, p in model.named_parameters():
        changed[id(p)] = nn.Parameter(change(name, p.detach()), requires_grad=p.requires_grad)
    for name, b in model.named_buffers():
        changed[id(b)] = change(name, b)
    return copy.deepcopy(model, changed)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
}


def of_recipe(recipe: Recipe, workers: int, data: Path | None = None) -> Workload:
    """A recipe, seen from one of its workers."""
    check_share(recipe.batch, workers)
    source = recipe.source(data)
    x, y = Batcher(recipe, source, torch.device("cpu"), world_size=workers).batch(0)
    return Workload(
        name=recipe.name,
        model=model_without_values(recipe, source),
        values=lambda: recipe.model(source),
        optimizer=recipe.optimizer,
        steps=recipe.steps,
        inputs=(x,),
        loss=lambda outputs: recipe.task.loss(outputs, y.to(outputs.device)),
        clip=recipe.clip,
        recipe=recipe.name,
        eval_every=recipe.eval_every,
        epochs=recipe.epochs,
        rate=_rate(recipe),
        suited={method: _own(recipe, method) for method in recipe.suited},
    )


def _rate(recipe: Recipe) -> Callable[[int], float]:
    return lambda step: recipe.rate.factor(step, recipe.steps, recipe.epochs)


def _own(recipe: Recipe, method: str) -> dict[str, Any]:
    """What a method has in place of the recipe's."""
    suited = recipe.suited_to(method)
    return {"optimizer": suited.optimizer, "rate": _rate(suited)}


def of_function(text: str, steps: int | None, optimizer: str = "adamw", *, values: bool = True) -> Workload:
    """The model that FILE.py:FUNCTION returns, alone or with the inputs of one worker's batch.

    Without `values` the model gets no initial ones: no step is timed with them.
    """
    if steps is None:
        raise ConfigError(f"a plan for the model of {text} needs the steps of a run; give --steps")
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    with nullcontext() if values else NoInitialValues():
        model, inputs = call_model(text)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"the model of {text} has no parameters to train")
    by_name = isinstance(inputs, Mapping)
    in_order = () if by_name or inputs is None else inputs if isinstance(inputs, tuple | list) else (inputs,)
    return Workload(
        name=text.rpartition(":")[2],
        model=model,
        optimizer=OPTIMIZERS[optimizer],
        steps=steps,
        inputs=tuple(in_order),
        keywords=dict(inputs) if by_name else {},
    )
