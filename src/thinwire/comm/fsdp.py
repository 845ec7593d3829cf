"""Models that groups shard with FSDP2's `fully_shard`.

Inside a group FSDP gathers parameters and averages gradients, as it does without Thinwire. Between groups a method
averages shards: worker i of a group with worker i of all others. A method sees this worker's shards as the parameters
of a model, and needs to know nothing of FSDP.

FSDP2 has no public way to exchange a parameter for others, so `_exchange` uses its own parts: each call of
`fully_shard` has made groups of `FSDPParam`, one for each parameter, which are gathered together. One leaves its group,
and new ones take its place. Everything else that the group does stays as the user chose it: when it gathers, in which
dtype, and over which mesh.
"""

import copy
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.base.errors import ConfigError
from thinwire.comm.sharded import like_whole, own_part
from thinwire.comm.wire import Wire
from thinwire.factor.convert import Layer
from thinwire.factor.layers import dense_class, factored_names, like_factored
from thinwire.factor.optimizers import Optimizers
from thinwire.factor.plain import plain_layer, to_plain

_OF_PARAMETER = ("sharded_param", "mesh_info", "post_forward_mesh_info", "device", "_post_load_hook_handle")
_SIGNATURE = "param module_info mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy"
_OLDEST = "2.11"
"""The oldest torch with which sharded groups were found to train as others do."""


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter is part of a larger one."""
    return any(is_part(p) for p in model.parameters())


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, p) for name, p in model.named_parameters() if is_part(p))


def is_part(t: Tensor) -> bool:
    """Whether this worker holds a part of it: a DTensor."""
    return hasattr(t, "device_mesh")


class Shard(nn.Parameter):
    """This worker's part of a parameter: the same memory, and the same gradient."""

    whole: Any

    def __new__(cls, whole: Any) -> "Shard":
        shard = torch.Tensor._make_subclass(cls, local(whole.detach()), whole.requires_grad)
        shard.whole = whole
        return shard

    @property
    def requires_grad(self) -> bool:
        """As the whole is trained now."""
        return self.whole.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.whole.requires_grad = value

    @property
    def grad(self) -> Tensor | None:
        found = self.whole.grad
        return None if found is None else local(found)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.whole.grad = None if value is None else like_whole(value, self.whole)


def local(value: Tensor) -> Tensor:
    """This worker's part of a tensor, which shares its memory; any other tensor as it is."""
    part: Any = value
    return part.to_local() if is_part(value) else value


def whole_of(p: Any) -> Any:
    """The parameter or the model that this is a worker's part of; itself if it is whole."""
    return getattr(p, "whole", p)


class ShardedModel(nn.Module):
    """What a method sees of a sharded model."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["whole"] = whole  # no submodule
        self.shards: dict[str, Shard] = {}
        self.placements: dict[str, Any] = {name: p.placements[0] for name, p in _parts(whole)}
        """By what dimension each parameter was sharded at first."""
        self.update()
        # A forward pass without a backward pass leaves parameters gathered. They may have been averaged since.
        self.fresh = whole.register_forward_pre_hook(lambda module, inputs: _reshard(whole), prepend=True)

    whole: nn.Module

    def update(self) -> None:
        """See the parameters that there are now; those that were there before are seen as the same objects."""
        known = {id(shard.whole): shard for shard in self.shards.values()}
        named = self.whole.named_parameters()
        self.shards = {name: known[id(p)] if id(p) in known else Shard(p) for name, p in named}
        own, all_ = (sum(p.numel() for p in each) for each in (self.shards.values(), self.whole.parameters()))
        self.share = own / all_
        """Of all values, those that this worker holds."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.shards.items()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self.whole.named_buffers()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.whole.named_modules()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This worker's part of it."""
        return {name: local(t) for name, t in self.whole.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the memory of this worker's part."""
        with torch.no_grad():
            for name, t in self.state_dict().items():
                t.copy_(state_dict[name])


def part_of(model: nn.Module, p: nn.Parameter) -> nn.Parameter:
    """What a method sees of a parameter that is in a module or an optimizer; itself if it is whole."""
    if not isinstance(model, ShardedModel):
        return p
    return next(shard for shard in model.shards.values() if shard.whole is p)


def with_modules(model: nn.Module) -> nn.Module:
    """The model that modules and optimizers know the parameters of; a sharded one with nothing gathered."""
    if isinstance(model, ShardedModel):
        _reshard(model.whole)
    return whole_of(model)


def shard_again(model: nn.Module, layer: Layer, old: Sequence[nn.Parameter]) -> None:
    """Shard a layer's parameters, which took the place of `old`, as those were; nothing if the model is not sharded."""
    if isinstance(model, ShardedModel):
        own = {id(p) for p in layer.parameters}
        new = [(layer.module, name) for name, p in layer.module._parameters.items() if id(p) in own]
        _exchange(model.whole, old, new, None if layer.is_factored else model.placements.get(layer.key))
        model.update()


def cut_like(value: Any, p: Any) -> Any:
    """State of a parameter, as a worker holds it that has a part of the parameter; anything else as it is."""
    if not is_part(p) or not isinstance(value, Tensor) or value.shape != p.shape:
        return value
    return like_whole(own_part(value, p), p)


def _reshard(model: nn.Module) -> None:
    """Free what was gathered of all shards."""
    for module in model.modules():
        if (free := getattr(module, "reshard", None)) is not None:
            free()


def refuse_on_shards(optimizers: Optimizers, **given: Any) -> bool:
    """Refuse what needs whole weights, or what other workers of the group have; whether shards are columns."""
    if torch.__version__ < _OLDEST:  # DiLoCo's outer step came out wrong with 2.7
        raise ConfigError(f"sharded models need torch {_OLDEST} or later, and this is {torch.__version__}: upgrade it")
    used = [name for name, value in given.items() if value is not None]
    if used:
        raise ConfigError(f"`{used[0]}` is not for sharded models: leave it out")
    for optimizer in optimizers:
        if type(optimizer).__name__ == "Muon" and not type(optimizer).__module__.startswith("torch."):
            raise ConfigError(
                f"{type(optimizer).__module__}.Muon orthogonalises whole weights, and the model is sharded: use "
                "torch.optim.Muon, which knows parts, or AdamW"
            )
    # FSDP's own choice is dimension 0, the rows.
    return any(getattr(p.placements[0], "dim", 0) for p in optimizers.parameters if hasattr(p, "placements"))


def refuse_reshaping(model: nn.Module) -> None:
    """Raise if shards cannot be given other shapes in this version of torch."""
    _refuse_unknown(whole_of(model))


def to_plain_shards(model: ShardedModel, wire: Wire) -> nn.Module:
    """Replace every factored layer, gathering one at a time; collective inside a group.

    A layer becomes the plain one in place, since FSDP may have its hooks on it.
    """

    def plain(module: nn.Module, *, in_place: bool) -> nn.Module:
        old = [p for p in module._parameters.values() if p is not None]
        whole = like_factored(module, _class_without(dense_class(module)))
        for name, p in module._parameters.items():
            all_of_it = None if p is None else nn.Parameter(wire.gathered(p.detach(), "decomposition"))
            whole.register_parameter(name, all_of_it)
        found = plain_layer(whole, in_place=in_place)
        _become(module, found)
        del module._factored
        if getattr(found, "low_rank", False):
            module.low_rank = True  # type: ignore[assignment]
        held = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None]
        _exchange(model.whole, old, [(part, name) for part, name, p in held if not is_part(p)])
        return module

    with_modules(model)
    if any(factored_names(module) for module in model.whole.modules()):
        to_plain(model.whole, plain)
        model.update()
    return model.whole


def hollow_copy(model: nn.Module) -> nn.Module:
    """A copy of a sharded model that is not sharded, with whole parameters that have no values."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    _reshard(model)
    held = (t for module in model.modules() for t in vars(module).values() if isinstance(t, Tensor))
    found: dict[int, Any] = {id(t): t.detach().clone() for t in held if not t.is_leaf}  # which hooks compute
    for p in model.parameters():
        empty = torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device="meta")
        found[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    # FSDP refuses to be copied, so this takes all that is a module's own.
    those = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    for module in those:
        cls = _class_without(type(module))
        state: Any = module._get_fsdp_state
        found |= {id(module): cls.__new__(cls), id(state()): state()}
    for module in those:
        own = {name: value for name, value in vars(module).items() if name not in (REGISTRY_KEY, STATE_KEY)}
        vars(found[id(module)]).update(copy.deepcopy(own, found))
    copied = copy.deepcopy(model, found)
    for module in copied.modules():
        for hooks in (value for name, value in vars(module).items() if name.endswith("_hooks")):
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[key]
    return copied


def blocks(model: nn.Module) -> list[nn.Module]:
    """Modules that FSDP gathers with all that is in them, where no other code has replaced their forward pass."""
    found = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    known = {id(module) for module in found}
    around = {id(module) for module in found if any(id(inner) in known for inner in list(module.modules())[1:])}
    return [module for module in found if id(module) not in around and "forward" not in vars(module)]


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.fsdp.", __name__))


def shard_like(copied: nn.Module, model: nn.Module) -> nn.Module:
    """Shard a hollow copy where the model is sharded; its parts have memory, and no values yet."""
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    placements = {name: p.placements[0] for name, p in _parts(model)}
    names = {id(p): name for name, p in copied.named_parameters()}
    together: dict[int, list[str]] = {}
    for name, module in reversed(list(model.named_modules())):
        if (state := getattr(module, "_get_fsdp_state", None)) is not None:
            together[id(state())] = [*together.pop(id(state()), []), name]
    for paths in together.values():
        group = next(_groups_of(model.get_submodule(paths[0])), next(_groups(model)))
        modules = [copied.get_submodule(path) for path in reversed(paths)]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=next(p.device_mesh for p in model.parameters()),  # type: ignore[attr-defined]
            reshard_after_forward=True,
            shard_placement_fn=lambda p: placements.get(names[id(p)]),
            mp_policy=group.mp_policy,
            offload_policy=group.offload_policy,
        )
    return copied._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def _exchange(
    model: nn.Module, old: Sequence[nn.Parameter], new: Sequence[tuple[nn.Module, str]], placement: Any = None
) -> None:
    """Shard whole parameters, each the one of this name of a module, as those are sharded that they replace.

    By rows, or by the dimension of a `placement`. `old` are in one group, and no longer in any module. All members of
    the group call it, with the same values, while nothing is gathered.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo

    group = next(group for group in _groups(model) if _those_of(group, old))
    gone = _those_of(group, old)
    first, place = gone[0], group.fsdp_params.index(gone[0])
    settings = first.mesh_info, first.post_forward_mesh_info, first.device
    made = []
    for module, name in new:
        whole: Any = module._parameters[name]
        info, policies = ParamModuleInfo(module, name), (group.mp_policy, group.offload_policy)
        made.append(FSDPParam(whole, info, *settings, lambda p: placement, *policies))
        made[-1].init_dtype_attrs(group.mp_policy)
    for each in gone:
        each._post_load_hook_handle.remove()  # it would look for the old parameter after each load
    kept = [each for each in group.fsdp_params if each not in gone]
    group.fsdp_params[:] = [*kept[:place], *made, *kept[place:]]


def _refuse_unknown(model: nn.Module) -> None:
    """Raise if this version of torch shards in a way that `_exchange` does not know: now, not when it is due."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo

        groups = list(_groups(model))
        known = [hasattr(each, name) for group in groups for each in group.fsdp_params for name in _OF_PARAMETER]
        known += [hasattr(group, name) for group in groups for name in ("mp_policy", "offload_policy")]
        known += [[*inspect.signature(FSDPParam).parameters] == _SIGNATURE.split(), bool(groups)]
        ParamModuleInfo(model, "")
    except (ImportError, AttributeError, TypeError):
        known = [False]
    if not all(known):
        raise ConfigError(
            f"factors of a sharded model are not for torch {torch.__version__}, in which FSDP keeps parameters in "
            "another way: use a method that leaves weights whole, such as DiLoCo or AB with factor_at=None, or torch "
            "2.13, with which they were tried"
        )


def _those_of(group: Any, parameters: Sequence[nn.Parameter]) -> list[Any]:
    return [each for each in group.fsdp_params if any(each.sharded_param is p for p in parameters)]


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from _groups_of(module)


def _groups_of(module: nn.Module) -> Iterator[Any]:
    if (state := getattr(module, "_get_fsdp_state", None)) is not None:
        found = state()
        # Older versions have one group for each call of `fully_shard`.
        yield from getattr(found, "_fsdp_param_groups", None) or filter(None, [found._fsdp_param_group])


def _class_without(cls: Any) -> Any:
    """The class that a module had before `fully_shard` was called on it."""
    from torch.distributed.fsdp import FSDPModule

    return next(each for each in cls.__mro__ if not issubclass(each, FSDPModule))


def _become(module: nn.Module, other: nn.Module) -> None:
    """Give a module the class, the parameters and the modules of another, and leave FSDP's hooks on it."""
    from torch.distributed.fsdp import FSDPModule

    cls, own = type(other), type(module)
    if issubclass(own, FSDPModule):
        cls = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": getattr(own, "__deepcopy__")})  # noqa: B009
    module.__class__ = cls
    for name in ("_parameters", "_modules"):
        module.__dict__[name] = other.__dict__[name]


def wrapper_inside(model: nn.Module) -> str | None:
    """The class name of what already averages or shards parameters of this model."""
    kinds = (DistributedDataParallel, *_classes("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule"))
    found = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if found is not None:
        return next(kind.__name__ for kind in kinds if isinstance(found, kind))
    sharded = _classes("torch.distributed.tensor", "DTensor")
    return "DTensor" if any(isinstance(p, sharded) for p in model.parameters()) else None


# Other wrappers would average or shard the same parameters. What they send is not in the ledger, and they would average
# over groups that should train apart.


def wrapper_around(parameters: Iterable[nn.Parameter]) -> str | None:
    """The class name of a wrapper that averages these parameters and is in a forward pass now."""
    active = DistributedDataParallel._get_active_ddp_module()
    if active is None:
        return None
    ours = {id(p) for p in parameters}
    return type(active).__name__ if any(id(p) in ours for p in active.parameters()) else None


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    """Classes of a torch module, if imported: importing FSDP takes a second, and without it there is no instance."""
    loaded = sys.modules.get(module)
    return tuple(found for name in names if (found := getattr(loaded, name, None)) is not None)
