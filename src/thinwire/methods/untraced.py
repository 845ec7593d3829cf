"""Keep Dynamo out of a method of an object."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def untraced(method: Callable[..., Any]) -> Any:
    """The method as `torch.compile` leaves it alone; what it calls may be compiled."""
    try:
        return torch.compiler.disable(method, recursive=False)
    except AttributeError:  # torch 2.6 marks functions only, not methods

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return torch.compiler.disable(call, recursive=False)
