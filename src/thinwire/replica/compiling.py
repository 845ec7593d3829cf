"""torch.compile for models that change shape: compiled in place, recompilations counted."""

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from thinwire.comm.fsdp import blocks, is_sharded


class Recompilations:
    """Counts recompilations, and warns once when Dynamo reaches its limit."""

    def __init__(self) -> None:
        self.start = self._compiled()
        self.count = 0
        self._warned = False

    def update(self) -> None:
        """Update the count."""
        made = self._compiled() - self.start
        if not made:
            return
        # The first compilation of a function is not a recompilation.
        self.count = sum(times - 1 for times in made.values())
        limit, most = getattr(torch._dynamo.config, _limit()), max(made.values())
        if most >= limit and not self._warned:
            self._warned = True
            warnings.warn(
                f"torch.compile compiled one function {most} times as ranks changed and reached its limit of {limit}: "
                f"raise torch._dynamo.config.{_limit()}, or train without compile",
                stacklevel=2,
            )

    @staticmethod
    def _compiled() -> Counter[Any]:
        """Number of compilations per function."""
        return Counter(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER)


def compile_in_place(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile a model in place; its identity and state dict keys stay the same.

    Of a model that groups shard, each block: what FSDP does around one is no part of a graph.
    """
    undo_compile(model)  # by an earlier attach
    for number, block in enumerate(blocks(model)):
        vars(block)["forward"] = _Compiled(block, number, options)
    if is_sharded(model):
        return

    def whole(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # Like `Module.compile`, but from a frame of ours: Dynamo skips the frames of torch.nn's containers.
    model._compiled_call_impl = torch.compile(whole, **options)


class _Compiled:
    """The compiled forward pass of a module, of whatever class it is when it is called."""

    def __init__(self, module: nn.Module, number: int, options: dict[str, Any]) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return type(module).forward(module, *args, **kwargs)

        # Dynamo's limit is for each code: blocks of one model must not use it up together.
        forward.__code__ = forward.__code__.replace(co_name=f"forward_of_block_{number}")
        self.forward = torch.compile(forward, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "_Compiled":
        return self  # until `undo_compile`


def undo_compile(model: nn.Module) -> None:
    """Let a model, or a copy of one, be as it was before it was compiled."""
    model._compiled_call_impl = None
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Compiled):
            del vars(module)["forward"]


def _limit() -> str:
    """The name of Dynamo's limit, which differs between versions of torch."""
    return "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
