"""The order in which a model uses its layers, to find the first and the last."""

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class OrderOfUse:
    """Names of the modules with weight matrices, in the order of a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.order: list[str] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def is_watching(self) -> bool:
        return bool(self._hooks)

    def watch(self) -> None:
        """Record every module that is called from now on."""
        for name, module in self.model.named_modules():
            if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._recorder(name)))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any) -> None:
            if name not in self.order:
                self.order.append(name)

        record.is_watch = True  # type: ignore[attr-defined]
        return record


def forget_watch(model: nn.Module) -> None:
    """Remove the hooks from a copy of a watched model."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "is_watch", False):
                del module._forward_pre_hooks[key]
