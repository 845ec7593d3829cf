"""What a run may use beside its method; methods answer whether they can.

Each class answers for what it adds, and asks its base for the rest: `Method.refuses(config, feature)`. So nobody keeps
a list of methods, and one of a user's own has every feature unless it refuses it.
"""

from enum import Enum
from typing import Any

from thinwire.config.common import parse_code


class Feature(Enum):
    """What a method may refuse, by its settings."""

    FAULTS = "faults=…"
    """Groups may be lost at any step: the others go on, and take back what was under way."""
    JOIN = "join()"
    """Some workers have fewer batches: they take part in what others wait for, with nothing new."""
    SHARDS = "sharded models"
    """Members of a group hold different parts of each weight."""
    COLUMNS = "models sharded by columns"
    """Those parts are not rows."""


def joins_not(what: str) -> str:
    """The words for settings that `join()` cannot have."""
    return f"join() is not for {what}; give all workers equally many batches"


def needs_whole_weights(config: Any) -> str:
    """The words for methods that a sharded model cannot have."""
    return (
        f"{type(config).__name__} needs whole weights on a worker, and the model is sharded: use AllReduce, LocalSGD, "
        "DiLoCo or AB, or a model that is not sharded"
    )


def refuses_code(config: Any, name: str, feature: Feature) -> str | None:
    """Why the code in this field cannot carry the parts of a sharded model."""
    code = getattr(config, name)
    kind = parse_code(code).kind
    if feature is Feature.SHARDS and kind == "topk":
        return f"`{name}`={code!r} looks at whole weights, and the model is sharded: use 'int8' or 'int2'"
    if feature is Feature.COLUMNS and kind == "lowrank":
        return (
            f"`{name}`={code!r} is for models sharded by rows, and shard_placement_fn chose another dimension: "
            "leave it out of fully_shard(), or use 'int8'"
        )
    return None
