"""Lightning, with a method of Thinwire in place of DistributedDataParallel.

    trainer = Trainer(strategy=ThinwireStrategy(thinwire.LocalSGD(every=24, wire="int2")), max_epochs=10)
    trainer.fit(module, loader)

Once this module is imported, `strategy="thinwire"` is AB as its defaults are.

A checkpoint has two parts: Lightning's own file, with the merged model in its full shape, and beside it a folder with
`.thinwire` at the end of its name, from which training resumes.

With `faults=` each group is one process, which Lightning takes for a whole job: it logs by itself and writes no
checkpoints. Samplers are Lightning's, by groups; what `reduce` and `sync_dist` give is of this group's share.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError
from thinwire.checkpoint.saves import remove
from thinwire.comm.process_groups import leave
from thinwire.config.faults import Faults
from thinwire.elastic.store import launched
from thinwire.integrations.dense import dense_state_of, transposed_layers
from thinwire.integrations.loop import refuse_faults
from thinwire.methods import AB
from thinwire.replica.attaching import attach
from thinwire.replica.replica import Replica


class ThinwireStrategy(DDPStrategy):
    """Processes as in DDPStrategy, which train by the method of a config."""

    strategy_name = "thinwire"

    def __init__(
        self, config: Any = lambda steps: AB(total_steps=steps), *, faults: Faults | None = None, **kwargs: Any
    ) -> None:
        """The method's config, or a function that makes one of the number of steps, which Lightning knows.

        With `Faults(joins=False)` the run goes on without groups that die.
        """
        super().__init__(**kwargs)
        self.config, self.faults = config, faults
        self.replica: Replica | None = None
        self._shown = ExitStack()
        self._resumed: Path | None = None
        self._transposed: list[str] = []

    # Training.

    def configure_ddp(self) -> None:
        """Not yet: optimizers come first."""

    def setup(self, trainer: Any) -> None:
        if self.faults is not None and trainer.state.fn != TrainerFn.FITTING:
            super(DDPStrategy, self).setup(trainer)  # DDPStrategy would broadcast the model
            return
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        refuse(trainer)
        if self.faults is not None and trainer.checkpoint_callbacks:
            raise ConfigError(
                "checkpoints with faults=… are not supported: Lightning takes each group for a whole job, and all "
                "would write the same files; give Trainer(enable_checkpointing=False), and save the model of one group "
                "at the end"
            )
        config = self.config(int(trainer.estimated_stepping_batches)) if callable(self.config) else self.config
        self._transposed = transposed_layers(self._module)
        self.replica = attach(self._module, self.optimizers, config, faults=self.faults)
        self.model = self.replica

    # Where groups may be lost, Lightning has one process, and the others are the replica's.

    def _configure_launcher(self) -> None:
        if self.faults is not None:
            refuse_faults(self.faults, "Lightning")
            if (workers := self.num_nodes * self.num_processes) != 1:
                raise ConfigError(
                    f"`devices` and `num_nodes` make {workers} workers: with faults=… each group is one process; give "
                    "Trainer(devices=1, num_nodes=1), and start one for each group with its THINWIRE_GROUP"
                )
        super()._configure_launcher()

    def setup_distributed(self) -> None:
        if self.faults is None:
            super().setup_distributed()
        else:
            self.set_world_ranks()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.faults is None:
            return super().distributed_sampler_kwargs
        _, _, group, groups = launched()
        return {"num_replicas": groups, "rank": group}

    def _setup_model(self, model: Any) -> Any:
        return super()._setup_model(model) if self.faults is None else model

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self.faults is None:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, src) if self.faults is None else obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return super().reduce(tensor, *args, **kwargs) if self.faults is None else tensor

    def all_gather(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return super().all_gather(tensor, *args, **kwargs) if self.faults is None else tensor

    # Steps.

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The closure first, as in a loop: what happens before an update needs its gradients."""
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """For all but the last of the batches whose gradients are accumulated."""
        with self._replica.no_sync():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """After a validation Lightning puts its own module back into training, and not what it is wrapped in."""
        self._replica.training = self._module.training

    def on_train_end(self) -> None:
        self._replica.finish()
        self.model = self._module
        if self.faults is not None:
            leave()  # no other group is needed any more, and Lightning would call them

    def on_exception(self, exception: BaseException) -> None:
        self._shown.close()
        if self.replica is not None and self.replica.phase != "finished":
            self.replica.detach()

    def on_validation_start(self) -> None:
        """Show the merged model until validation ends."""
        if self.replica is not None and self.replica.phase != "finished":
            self._shown.enter_context(self.replica.merged())

    def on_validation_end(self) -> None:
        self._shown.close()

    @property
    def _replica(self) -> Replica:
        assert self.replica is not None, "fit() has not begun"
        return self.replica

    @property
    def _module(self) -> Any:
        return self.lightning_module

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The merged model in its full shape; collective during training."""
        with ExitStack() as stack:
            if self.replica is not None and self.replica.phase != "finished":
                if self.faults is not None:
                    raise ConfigError(
                        "save_checkpoint() with faults=… is not supported in training; save the model at the end, or "
                        "call `trainer.strategy.replica.save(folder)` in all groups"
                    )
                stack.enter_context(self.replica.merged())
            return dense_state_of(self._module, self._transposed)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Each worker's own, and in the replica's save."""
        return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._resumed is not None:
            self._replica.load(beside(self._resumed))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.faults is not None and self._module.trainer.state.fn == TrainerFn.FITTING:
            raise ConfigError(
                f"`ckpt_path`={str(checkpoint_path)!r} with faults=… is not supported: leave it out, or load the model "
                "with load_from_checkpoint()"
            )
        self._resumed = Path(checkpoint_path)
        if not beside(self._resumed).is_dir() and self._module.trainer.state.fn == TrainerFn.FITTING:
            raise ConfigError(
                f"there is no folder `{beside(self._resumed)}`: the checkpoint was not written by ThinwireStrategy; "
                "load its model with load_from_checkpoint() and fit() without `ckpt_path`"
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.replica is not None and self.replica.phase != "finished":
            self.replica.save(beside(Path(filepath)))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero and beside(Path(filepath)).is_dir():
            remove(beside(Path(filepath)))
        super().remove_checkpoint(filepath)


class ThinwireNumbers(Callback):
    """Logs the replica's numbers with Lightning's own loggers: `Trainer(callbacks=[ThinwireNumbers()], …)`."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.log_dict(trainer.strategy.replica.numbers())


def beside(checkpoint: Path) -> Path:
    """The folder of the replica's save."""
    return checkpoint.with_name(f"{checkpoint.name}.thinwire")


def refuse(trainer: Any) -> None:
    """What would go around the replica, in one sentence."""
    if trainer.precision == "16-mixed":
        raise ConfigError("precision='16-mixed' is not for ThinwireStrategy: use 'bf16-mixed'")
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigError("manual optimization is not for ThinwireStrategy so far: use automatic optimization")


StrategyRegistry.register("thinwire", ThinwireStrategy, description="trains by thinwire.AB")
