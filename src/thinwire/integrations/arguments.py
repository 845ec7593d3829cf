"""Arguments of Hugging Face's Trainer that are not for Thinwire."""

from typing import Any

from thinwire.base.errors import ConfigError


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
