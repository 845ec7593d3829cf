"""A factored model that stays sharded, in plain torch.nn layers."""

from torch import nn

from thinwire.comm import fsdp
from thinwire.comm.collectives import Wire
from thinwire.factor.export import plain_layer, to_plain
from thinwire.factor.layers import dense_class, factored_names, like_factored
from thinwire.shards import ShardedModel, is_part, with_modules


def to_plain_shards(model: ShardedModel, wire: Wire) -> nn.Module:
    """Replace every factored layer, gathering one at a time; collective inside a group.

    A layer becomes the plain one in place, since FSDP may have its hooks on it.
    """

    def plain(module: nn.Module, *, in_place: bool) -> nn.Module:
        old = [p for p in module._parameters.values() if p is not None]
        whole = like_factored(module, fsdp.class_without(dense_class(module)))
        for name, p in module._parameters.items():
            all_of_it = None if p is None else nn.Parameter(wire.gathered(p.detach(), "decomposition"))
            whole.register_parameter(name, all_of_it)
        found = plain_layer(whole, in_place=in_place)
        fsdp.become(module, found)
        del module._factored
        if getattr(found, "low_rank", False):
            module.low_rank = True  # type: ignore[assignment]
        held = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None]
        fsdp.exchange(model.whole, old, [(part, name) for part, name, p in held if not is_part(p)])
        return module

    with_modules(model)
    if any(factored_names(module) for module in model.whole.modules()):
        to_plain(model.whole, plain)
        model.update()
    return model.whole
