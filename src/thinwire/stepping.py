"""A replica's part in the user's steps: hooks on the optimizer, and on the GradScaler if there is one."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

Release = Callable[[], None]


def hook_into_optimizer(
    optimizer: Optimizer,
    lr_factor: Callable[[], float],
    before_update: Callable[[], None],
    after_update: Callable[[], None],
    after_step: Callable[[], None],
) -> list[Release]:
    """Scale the learning rate in each update and put it back, with calls around it; then call `after_step`."""
    kept: list[Any] = []

    def put_back() -> None:
        for group, lr in zip(optimizer.param_groups, kept, strict=False):
            group["lr"] = lr
        kept.clear()

    def before(*_: Any) -> None:
        put_back()  # a closure that raised ended the last step before its time
        factor = lr_factor()
        if factor != 1.0:
            kept[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        before_update()

    def after(*_: Any) -> None:
        # Before a phase may change, so that schedulers never see the scaled rate.
        put_back()
        after_update()
        after_step()

    return [optimizer.register_step_pre_hook(before).remove, optimizer.register_step_post_hook(after).remove]


def hook_into_scaler(
    scaler: Any, optimizer: Optimizer, after_step: Callable[[], None], after_update: Callable[[], None]
) -> list[Release]:
    """A step is a call of `scaler.step`, skipped or not; after a merge all scales must agree."""
    step, update = scaler.step, scaler.update

    def counted_step(stepped: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = step(stepped, *args, **kwargs)
        if stepped is optimizer:
            after_step()
        return result

    def agreeing_update(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        after_update()

    scaler.step, scaler.update = counted_step, agreeing_update

    def release() -> None:
        del scaler.step, scaler.update

    return [release]
