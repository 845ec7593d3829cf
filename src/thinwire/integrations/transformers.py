"""Hugging Face's Trainer, with a method of Thinwire in place of DistributedDataParallel.

    method = lambda steps: thinwire.AB(total_steps=steps)
    trainer = ThinwireTrainer(model, arguments, train_dataset=data, thinwire=method)
    trainer.train()

Trainer keeps a model that somebody else has wrapped as it is, so wrapping it is all that has to be replaced. A
checkpoint has two parts: what Trainer writes, with the merged model in its full shape, and a folder `thinwire`, from
which training resumes.

With `faults=` each group is one process, which Trainer takes for a whole job. It trains on the group's share of the
data, evaluates on all of it, logs by itself and writes no checkpoints.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from thinwire.base.errors import ConfigError
from thinwire.config.faults import Faults
from thinwire.elastic.store import launched
from thinwire.integrations.dense import dense_state_of, transposed_layers
from thinwire.integrations.loop import refuse_faults
from thinwire.replica.attaching import attach
from thinwire.replica.replica import Replica

FOLDER = "thinwire"
"""In a checkpoint: what `replica.save` writes."""


class ThinwireTrainer(Trainer):
    """A Trainer whose workers train by the method of a config."""

    def __init__(self, *args: Any, thinwire: Any, faults: Faults | None = None, **kwargs: Any) -> None:
        """`thinwire` is the method's config, or makes one of the number of steps, which Trainer knows.

        With `Faults(joins=False)` the run goes on without groups that die.
        """
        super().__init__(*args, **kwargs)
        self.config, self.replica, self.faults = thinwire, None, faults
        self.length = 0
        self._transposed: list[str] = []
        # It would gather the number of tokens from all workers in every step.
        self.args.average_tokens_across_devices = False
        refuse(self.args, fsdp=self.is_fsdp_enabled)
        if faults is not None:
            refuse_with_faults(self.args, faults)
            self.train_dataset = share_of_group(self.train_dataset)

    model: nn.Module
    optimizer: Any
    lr_scheduler: Any
    replica: Replica | None
    """The model in training; None before `train`."""

    # Training.

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self.length = max_steps
        if self.faults is not None and resume_from_checkpoint is not None:
            raise ConfigError(
                f"`resume_from_checkpoint`={resume_from_checkpoint!r} with faults=… is not supported; leave it out, or "
                "start from the checkpoint's model with from_pretrained()"
            )
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._attached.load(self._saved(resume_from_checkpoint))
        return prepared

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """A replica instead of DistributedDataParallel; here the optimizer is made, and nobody has wrapped it."""
        if not training:
            return model
        if self.replica is not None and self.replica.phase != "finished":
            self.replica.detach()  # by a call of train() that has raised
        self._transposed = transposed_layers(self.model)
        config = for_length(self.config, self.length)
        if self.args.load_best_model_at_end and hasattr(config, "cutoff"):
            raise ConfigError(
                f"`load_best_model_at_end` with {type(config).__name__}: checkpoints have the model in its full shape, "
                "and the one at the end is smaller; leave it out, or use LocalSGD or DiLoCo"
            )
        self.replica = attach(self.model, self.optimizer, config, faults=self.faults)
        return self.replica

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._attached.finish()
        self.model_wrapped = self.model
        found = super()._finalize_training(*args, **kwargs)
        if self._attached.finished_ranks:  # other parameters: one more call of train() makes an optimizer for them
            self.optimizer = self.lr_scheduler = None
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """On the merged model."""
        with self._merged():
            return super().evaluation_loop(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With the replica's numbers."""
        numbers = self.replica.numbers() if self.replica is not None else {}
        super().log(logs | numbers, *args, **kwargs)

    @property
    def _attached(self) -> Replica:
        assert self.replica is not None, "train() has not begun"
        return self.replica

    @contextmanager
    def _merged(self) -> Iterator[None]:
        replica = self.replica
        if replica is None or replica.phase == "finished":
            yield
            return
        with replica.merged():
            yield

    # Checkpoints.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        self._attached.save(folder / FOLDER)  # first: Trainer counts the folder as a checkpoint when it is done
        super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The merged model, collective, in its full shape: `from_pretrained` reads it."""
        with self._merged():
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, dense_state_of(self.model, self._transposed) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Optimizer state is each worker's own, and in the replica's save."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            path = os.path.join(checkpoint, SCHEDULER_NAME)
            self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))

    def _saved(self, checkpoint: str) -> Path:
        folder = Path(checkpoint, FOLDER)
        if not folder.is_dir():
            raise ConfigError(
                f"`{checkpoint}` has no folder `{FOLDER}`: it was not written by ThinwireTrainer; start from its model "
                "with from_pretrained() and train() without `resume_from_checkpoint`"
            )
        return folder


def share_of_group(data: Any) -> Any:
    """Every so many examples, equally many in each group, which Trainer shuffles."""
    if not hasattr(data, "__len__"):
        raise ConfigError(
            f"`train_dataset` is a {type(data).__name__} without a length, which cannot be shared out among groups: "
            "with faults=… give a dataset that has one"
        )
    _, _, group, groups = launched()
    mine = range(group, len(data) - len(data) % groups, groups)
    return data.select(mine) if hasattr(data, "select") else Subset(data, mine)


def for_length(config: Any, steps: int) -> Any:
    """The config of a run of so many steps."""
    return config(steps) if callable(config) else config


def refuse(arguments: Any, *, fsdp: bool) -> None:
    """What would go around the replica, in one sentence."""
    settings = {
        "deepspeed": bool(arguments.deepspeed),
        "fsdp": fsdp,
        "fp16": arguments.fp16,
        "auto_find_batch_size": arguments.auto_find_batch_size,
        "save_only_model": arguments.save_only_model,
        "torch_compile": arguments.torch_compile,
    }
    for name, is_used in settings.items():
        if is_used:
            hint = "; use bf16=True" if name == "fp16" else ""
            raise ConfigError(f"`{name}` is not for ThinwireTrainer: leave it out{hint}")
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"Trainer found {arguments.n_gpu} GPUs and one process, and would use DataParallel: start one process per "
            "GPU with torchrun"
        )


def refuse_with_faults(arguments: Any, faults: Faults) -> None:
    """What cannot be where groups may be lost."""
    refuse_faults(faults, "Trainer")
    if arguments.save_strategy != "no":
        raise ConfigError(
            f"`save_strategy`={str(arguments.save_strategy.value)!r} with faults=… is not supported: Trainer takes "
            "each group for a whole job, and all would write the same checkpoints; give save_strategy='no', and save "
            "the model of one group at the end"
        )
    if (batches := arguments.gradient_accumulation_steps) > 1:
        raise ConfigError(
            f"`gradient_accumulation_steps`={batches} with faults=… is not supported: Trainer takes a group for a "
            "whole job, and would let the gradients of each batch be exchanged; use 1, and larger batches"
        )
