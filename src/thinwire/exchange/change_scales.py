"""What each group's changes are multiplied by before they are averaged: rows by who saw them, or all by moments."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.fsdp import is_part, whole_of, with_modules
from thinwire.comm.sharded import own_part
from thinwire.comm.wire import Wire
from thinwire.exchange.averaged import AveragedTensors
from thinwire.exchange.parts import MethodContext
from thinwire.exchange.second_moment import SecondMoment


class ChangeScales:
    """`rows` and `second_moment` of a method whose groups train apart."""

    def __init__(self, config: Any, context: MethodContext, share: float, is_apart: Callable[[], bool]) -> None:
        """`share` is this group's of all workers."""
        self.is_apart = is_apart
        self.moments = SecondMoment(context, config.second_moment, share, is_apart, config.moments_wire)
        self.rows = SeenRows(context.model, context.wire) if config.rows == "seen" else None
        if self.rows is not None:
            context.on_release.append(self.rows.release)

    @property
    def are_used(self) -> bool:
        """Whether changes are multiplied by anything at all."""
        return self.rows is not None or self.moments.kind == "shared"

    def separate(self) -> None:
        """The warm-up is over."""
        if self.is_apart():
            self.moments.separate()

    def forget(self) -> None:
        """Drop what codes left out of moments, and who saw which rows: other values were loaded."""
        self.moments.coded.load_state_dict({})
        if self.rows is not None:
            self.rows.load_state_dict({})

    def of(
        self, sent: Sequence[AveragedTensors], everything: Sequence[AveragedTensors], *, ends_round: bool
    ) -> list[list[Tensor | None]]:
        """For each tensor of those that are sent now; collective. Moments are shared when a round ends."""
        if not (self.is_apart() and self.are_used):
            return [[] for _ in sent]
        weights = [whole_of(p) for fragment in sent for p in fragment.tensors()]
        rows = self.rows.scales(weights, again=not ends_round) if self.rows is not None else {}
        parts = {
            number: [whole_of(p) for p in fragment.tensors() if isinstance(p, nn.Parameter)]
            for number, fragment in enumerate(everything)
            if fragment in sent
        }
        gains = self.moments.exchange(parts) if ends_round else {}
        keys = [[id(whole_of(p)) for p in fragment.tensors()] for fragment in sent]
        return [[rows.get(key, gains.get(key)) for key in each] for each in keys]

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all workers, and what is this worker's."""
        rows = self.rows.state_dict() if self.rows is not None else {}
        return {
            "shared": self.moments.state_dict(),
            "local": {"moments": self.moments.coded.state_dict(), "rows": rows},
        }

    def load_state_dict(self, shared: dict[str, Any], local: dict[str, Any] | None, stays: bool = False) -> None:
        """Errors start again where groups are not as they were, and counts unless this worker `stays`."""
        self.moments.load_state_dict(shared)
        self.moments.coded.load_state_dict(local["moments"] if local and not stays else {})
        if self.rows is not None:
            self.rows.load_state_dict(local["rows"] if local else {})


_KINDS = (nn.Embedding, nn.EmbeddingBag)


class SeenRows:
    """Counts the rows that this worker's batches look up, in all embeddings of a model whose weights are trained.

    A word that only one of G groups has seen moves in that group alone, and a mean over groups takes 1/G of the way.
    Here each group's change of a row counts by its share of all that saw the row since the last average. Rows that all
    groups see equally often, such as positions, are averaged as usual, and so are rows that nobody has seen.
    """

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
        for name, module in with_modules(self.model).named_modules():
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
        sent, seen, names = {id(weight): weight for weight in weights}, dict[int, Tensor](), []
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
        # Of a sharded weight this worker has some rows.
        return {
            key: (own_part(part, sent[key]) if is_part(sent[key]) else part)[:, None]
            for key, part in zip(seen, parts, strict=True)
        }

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
