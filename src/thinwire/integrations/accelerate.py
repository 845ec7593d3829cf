"""Hugging Face's Accelerate, with a method of Thinwire in place of DistributedDataParallel.

    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)        # not the model
    with attached(accelerator, model, optimizer, thinwire.AB(total_steps=1000)) as replica:
        for x, y in loader:
            with accelerator.accumulate(replica):
                accelerator.backward(loss(replica(x), y))
                …

`accelerator.save_state` and `load_state` then save and load the replica too, in a folder `thinwire`.

With `faults=` each group is one process, which Accelerate takes for a whole job: share out the data by
`replica.data_rank` and `replica.data_world_size`, and save by `replica.save`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError
from thinwire.config.faults import Faults
from thinwire.integrations.loop import refuse_faults
from thinwire.replica.attaching import attach
from thinwire.replica.replica import Replica

FOLDER = "thinwire"
"""In a checkpoint: what `replica.save` writes."""


@contextmanager
def attached(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    config: Any,
    *,
    faults: Faults | None = None,
) -> Iterator[Replica]:
    """Train `model` by the method whose config this is; collective. The replica is finished at the end.

    If training raises, it is detached instead, since the others may not come. With `Faults(joins=False)` the run goes
    on without groups that die.
    """
    refuse(accelerator, model)
    if faults is not None:
        refuse_with_faults(accelerator, faults)
    model.to(accelerator.device)
    replica = attach(model, optimizer, config, faults=faults)
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    # The accelerator would save the first worker's moments and load them on all, over those of the replica's save.
    saved = [each for each in accelerator._optimizers if any(each is own for own in given)]
    for each in saved:
        accelerator._optimizers.remove(each)

    def save(models: Any, weights: Any, folder: str) -> None:
        _refuse_states(faults)
        replica.save(Path(folder, FOLDER))

    def load(models: Any, folder: str) -> None:
        _refuse_states(faults)
        replica.load(Path(folder, FOLDER))

    handles = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    try:
        yield replica
    except BaseException:
        replica.detach()
        raise
    finally:
        for handle in handles:
            handle.remove()
        accelerator._optimizers.extend(saved)
    replica.finish()


def refuse(accelerator: Accelerator, model: nn.Module) -> None:
    """What would go around the replica, in one sentence."""
    if any(accelerator.unwrap_model(prepared) is accelerator.unwrap_model(model) for prepared in accelerator._models):
        raise ConfigError(
            "the model was given to accelerator.prepare(), which averages its gradients at every step; prepare the "
            "optimizer, loader and scheduler only"
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError("mixed_precision='fp16' is not for Thinwire with Accelerate: use mixed_precision='bf16'")
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ConfigError(f"Accelerate is set up for {kind}, which has its own way to average; use plain processes")


def refuse_with_faults(accelerator: Accelerator, faults: Faults) -> None:
    """What cannot be where groups may be lost."""
    refuse_faults(faults, "Accelerate")
    if (batches := accelerator.gradient_accumulation_steps) > 1:
        raise ConfigError(
            f"`gradient_accumulation_steps`={batches} with faults=… is not supported: Accelerate takes a group for a "
            "whole job, and would let the gradients of each batch be exchanged; use 1, and larger batches"
        )


def _refuse_states(faults: Faults | None) -> None:
    if faults is not None:
        raise ConfigError(
            "accelerator.save_state() and load_state() with faults=… are not supported: in each group Accelerate takes "
            "itself for the first process, and all would write the same files; use `replica.save(folder)` and "
            "`replica.load(folder)` in all groups"
        )
