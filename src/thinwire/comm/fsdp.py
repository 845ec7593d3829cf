"""Parameters of a model that FSDP2 shards, exchanged for others.

FSDP2 has no public way to do that, so this uses its own parts: each call of `fully_shard` has made groups of
`FSDPParam`, one for each parameter, which are gathered together. One leaves its group, and new ones take its place.
Everything else that the group does stays as the user chose it: when it gathers, in which dtype, and over which mesh.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from thinwire.base.errors import ConfigError


def exchange(model: nn.Module, old: Sequence[nn.Parameter], new: Sequence[tuple[nn.Module, str]]) -> None:
    """Shard whole parameters, each the one of this name of a module, as those are sharded that they replace.

    `old` are in one group, and no longer in any module. All members of the group call it, with the same values, while
    nothing is gathered.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo

    group = next(group for group in _groups(model) if _those_of(group, old))
    gone = _those_of(group, old)
    first, place = gone[0], group.fsdp_params.index(gone[0])
    settings = first.mesh_info, first.post_forward_mesh_info, first.device, None, group.mp_policy, group.offload_policy
    made = []
    for module, name in new:
        whole: Any = module._parameters[name]
        made.append(FSDPParam(whole, ParamModuleInfo(module, name), *settings))
        made[-1].init_dtype_attrs(group.mp_policy)
    for each in gone:
        each._post_load_hook_handle.remove()  # it would look for the old parameter after each load
    kept = [each for each in group.fsdp_params if each not in gone]
    group.fsdp_params[:] = [*kept[:place], *made, *kept[place:]]


_OF_PARAMETER = ("sharded_param", "mesh_info", "post_forward_mesh_info", "device", "_post_load_hook_handle")
_SIGNATURE = "param module_info mesh_info post_forward_mesh_info device shard_placement_fn mp_policy offload_policy"


def refuse_unknown(model: nn.Module) -> None:
    """Raise if this version of torch shards in a way that `exchange` does not know: now, not when it is due."""
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
            "another way: use factor_at=None, or torch 2.13, with which they were tried"
        )


def _those_of(group: Any, parameters: Sequence[nn.Parameter]) -> list[Any]:
    return [each for each in group.fsdp_params if any(each.sharded_param is p for p in parameters)]


def _groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if (state := getattr(module, "_get_fsdp_state", None)) is not None:
            found = state()
            # Older versions have one group for each call of `fully_shard`.
            yield from getattr(found, "_fsdp_param_groups", None) or filter(None, [found._fsdp_param_group])


def class_without(cls: Any) -> Any:
    """The class that a module had before `fully_shard` was called on it."""
    from torch.distributed.fsdp import FSDPModule

    return next(each for each in cls.__mro__ if not issubclass(each, FSDPModule))


def become(module: nn.Module, other: nn.Module) -> None:
    """Give a module the class, the parameters and the modules of another, and leave FSDP's hooks on it."""
    from torch.distributed.fsdp import FSDPModule

    cls, own = type(other), type(module)
    if issubclass(own, FSDPModule):
        cls = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": getattr(own, "__deepcopy__")})  # noqa: B009
    module.__class__ = cls
    for name in ("_parameters", "_modules"):
        module.__dict__[name] = other.__dict__[name]
