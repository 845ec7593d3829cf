"""Rows of embeddings, averaged by how often each group saw them.

A word that only one of G groups has seen moves in that group alone, and a mean over groups takes 1/G of the way. Here
each group's change of a row counts by its share of all that saw the row since the last average. Rows that all groups
see equally often, such as positions, are averaged as usual, and so are rows that nobody has seen.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.wire import Wire

_KINDS = (nn.Embedding, nn.EmbeddingBag)


class SeenRows:
    """Counts the rows that this worker's batches look up, in all embeddings of a model whose weights are trained."""

    def __init__(self, model: nn.Module, wire: Wire) -> None:
        self.model, self.wire = model, wire
        self.counts: dict[str, Tensor] = {}
        """By the name of the embedding, since its weight was last sent."""
        count = torch.compiler.disable(self._count)
        self._hooks = []
        for name, module in self._embeddings():
            self.counts[name] = torch.zeros(module.num_embeddings, device=module.weight.device)
            hook = module.register_forward_pre_hook(_named(count, name), with_kwargs=True)
            self._hooks.append(hook)

    def _embeddings(self) -> Iterable[tuple[str, Any]]:
        for name, module in self.model.named_modules():
            if isinstance(module, _KINDS) and isinstance(module.weight, nn.Parameter) and module.weight.requires_grad:
                yield name, module

    def _count(self, name: str, module: nn.Module, ids: Tensor) -> None:
        counts = self.counts[name]
        if module.training and torch.is_grad_enabled():
            flat = ids.detach().reshape(-1)
            counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))

    def scales(self, weights: Iterable[Tensor], *, again: bool) -> dict[int, Tensor]:
        """What each group's change of a row is multiplied by before the mean over groups, (rows, 1), by id of weights.

        Collective, for those of these weights that are embeddings. Unless `again`, their counts start from zero; a
        weight that several modules share has all their counts.
        """
        sent, seen, names = {id(weight) for weight in weights}, dict[int, Tensor](), []
        for name, module in self._embeddings():
            if name in self.counts and id(module.weight) in sent:
                before = seen.get(id(module.weight))
                seen[id(module.weight)] = self.counts[name] + (0 if before is None else before)
                names.append(name)
        if not seen or len(self.wire.topology.groups) == 1:
            return {}
        own = torch.cat(list(seen.values()))
        self.wire.sum_in_group(own, "merge")
        total = own.clone()
        self.wire.sum_over_groups([total], "merge")
        topology = self.wire.topology
        scale = own.div(total).mul_(topology.world_size / len(topology.group))
        scale = torch.where(total > 0, scale, torch.ones_like(scale))
        if not again:
            for name in names:
                self.counts[name].zero_()
        parts = scale.split([len(counts) for counts in seen.values()])
        return {key: part[:, None] for key, part in zip(seen, parts, strict=True)}

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def state_dict(self) -> dict[str, Tensor]:
        return self.counts

    def load_state_dict(self, counts: dict[str, Tensor]) -> None:
        """Counts of embeddings that this model has."""
        for name, held in self.counts.items():
            held.copy_(counts[name]) if name in counts else held.zero_()


def _named(count: Any, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count(name, module, args[0] if args else kwargs["input"])

    return hook
