"""torch.compile over models that change their shape: compiled in place, and every new start counted."""

import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn


class Recompilations:
    """Counts how often torch.compile started again, and warns once where Dynamo gives up."""

    def __init__(self) -> None:
        self.start = self._compiled()
        self.count = 0
        self._warned = False

    def look(self) -> None:
        """Count anew."""
        made = self._compiled() - self.start
        if not made:
            return
        # The first time is a function's due; a model that breaks into many functions has not started again.
        self.count = sum(times - 1 for times in made.values())
        limit, most = getattr(torch._dynamo.config, _limit()), max(made.values())
        if most >= limit and not self._warned:
            self._warned = True
            warnings.warn(
                f"torch.compile has compiled one function {most} times over changing ranks and stops at its limit of "
                f"{limit}: raise torch._dynamo.config.{_limit()}, or train without compile",
                stacklevel=2,
            )

    @staticmethod
    def _compiled() -> Counter[Any]:
        """How often Dynamo compiled each function."""
        return Counter(torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER)


def compile_in_place(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile a model in place, so that its identity and the names of its state stay."""

    def whole(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # As `Module.compile` does, but starting from a frame of ours: Dynamo skips those of torch.nn's containers.
    model._compiled_call_impl = torch.compile(whole, **options)


def _limit() -> str:
    """Where Dynamo keeps its limit; older versions of torch have another name for it."""
    return "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
