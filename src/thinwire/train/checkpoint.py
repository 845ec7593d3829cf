"""The saves of a run: the replica's files, and beside them the state of the loop.

checkpoint/step-000400/    the state after 400 steps, written whole or not at all
    position.json          step, seconds so far, the scheduler, and the run's identity
    random-RANK.safetensors, random-RANK.json    one pair per worker
    …                      what `replica.save` writes
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from thinwire.base.errors import ConfigError, DamagedError, LostError
from thinwire.base.files import json_text, read_json, read_tensors
from thinwire.base.schema import ANY, COUNT, FIGURE, NUMBER, Row, like
from thinwire.checkpoint.also import RandomState
from thinwire.checkpoint.saves import Files, all_saves, copied, find_sound_together
from thinwire.config.settings import describe
from thinwire.replica.replica import Replica
from thinwire.train.task import Recipe, describe_optimizer

log = logging.getLogger("thinwire")
POSITION = {
    "step": COUNT,
    "wall_s": NUMBER,
    "evaluating_s?": NUMBER,
    "counts": {str: COUNT},
    "best?": (None, {"step": COUNT, "epochs_since": COUNT, "validation_loss": FIGURE}),
    "identity": {str: ANY},
    "scheduler": {str: ANY},
}
"""What `position.json` has."""


def beside(replica: Replica, scheduler: LambdaLR, position: dict[str, Any]) -> Files:
    """This worker's files of a save of the whole run, in memory, but for the replica's."""
    rank, files = replica.topology.rank, Files()
    state = RandomState().state_dict()
    keys, *rest = state["numpy"]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)} | {"numpy": keys}
    plain = {"python": state["python"], "numpy": rest}
    files[f"random-{rank}.safetensors"] = copied(tensors)
    files[f"random-{rank}.json"] = json_text(plain)
    if rank == 0:
        files["position.json"] = json_text(position | {"scheduler": _plain(scheduler)})
    return files


def best_steps(folder: Path) -> set[int]:
    """The best epochs that saves in `folder` refer to."""
    found: set[int] = set()
    for path in all_saves(folder):
        with suppress(DamagedError, OSError):
            best = read_json(path / "position.json")["best"]
            found |= {best["step"]} if best else set()
    return found


def resume(folder: Path, replica: Replica, scheduler: LambdaLR, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """Load the latest sound save in `folder` and return its position, None if there are no saves; collective.

    All workers load the same one. A damaged save is reported, and the one before it is loaded.
    """
    sound: list[Path | None] = []
    if not replica.together(lambda: sound.append(find_sound_together(folder, replica.wire)), "resuming"):
        raise LostError("this group was given up while the run was resumed; start it again to join")
    if (latest := sound[-1]) is None:
        return None
    saved = position(latest, wanted)
    load(latest, replica, scheduler, check=False)
    return saved


def position_found(folder: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The position of the latest save that can be read, if there is one; refuses another run's."""
    for path in all_saves(folder):
        with suppress(DamagedError):
            return position(path, wanted)
    return None


def identity(recipe: Recipe, config: Any, seed: int) -> dict[str, Any]:
    """What makes two runs the same, for resuming one or finding it finished; plain values."""
    about = {"recipe": recipe.name, "method": type(config).__name__, "seed": seed}
    about |= {
        name: getattr(recipe, name) for name in ("steps", "epochs", "batch", "clip", "autocast", "patience", "split")
    }
    about |= {"task": _described(recipe.task), "rate": _described(recipe.rate), "views": _described(recipe.transform)}
    return json.loads(json.dumps(about | describe_optimizer(recipe.optimizer) | describe(config)))


def _described(part: Any) -> str:
    """A part of a recipe by its fields, or by the name of its type: a repr with an address changes every time."""
    return repr(part) if is_dataclass(part) else type(part).__qualname__


def position(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The position of a saved run; refuses a run whose identity is not `wanted`."""
    saved = read_json(folder / "position.json", schema=POSITION)
    there = saved["identity"]
    if name := differing(there, wanted):
        raise ConfigError(
            f"cannot resume from `{folder}`: it was saved with `{name}`={there.get(name)!r}, "
            f"this run has {wanted[name]!r}; give the same settings, another `--out`, "
            "or `--overwrite` instead of `--resume`"
        )
    return saved


def differing(there: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """The first name in which a run on disk differs from the identity `wanted`; None if it is the same run."""
    return next((name for name, value in wanted.items() if there.get(name) != value), None)


def load(folder: Path, replica: Replica, scheduler: LambdaLR, *, check: bool = True) -> None:
    """Load a saved run into a freshly built one; collective."""
    replica.load(folder, check=check)
    _load_scheduler(scheduler, folder / "position.json")
    rank = replica.topology.rank
    if (folder / f"random-{rank}.json").is_file():
        # Workers that did not exist when the run was saved keep their seeds.
        files = folder / f"random-{rank}.safetensors", folder / f"random-{rank}.json"
        tensors, plain = read_tensors(files[0]), read_json(files[1])
        try:
            RandomState().load_state_dict(plain | tensors | {"numpy": [tensors["numpy"], *plain["numpy"]]})
        except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise DamagedError(
                f"`{files[0]}` or `{files[1].name}` is damaged and holds no valid random state ({error}); "
                "restore the file, or use an older save"
            ) from error


def _load_scheduler(scheduler: LambdaLR, file: Path) -> None:
    """A scheduler takes any attribute that it is given, so it is given its own."""
    plain = _plain(scheduler)
    kinds = {
        f"{name}?": Row([like(value[0], fresh=True)] * len(value))
        if isinstance(value, list)
        else like(value, fresh=True)
        for name, value in plain.items()
    }
    saved = read_json(file, schema=POSITION | {"scheduler": kinds})["scheduler"]
    scheduler.load_state_dict(
        {name: saved.get(name, value) for name, value in plain.items()} | {"lr_lambdas": plain["lr_lambdas"]}
    )


def _plain(scheduler: LambdaLR) -> dict[str, Any]:
    state = scheduler.state_dict()
    # A checkpoint holds no code: the schedule's functions are rebuilt from the recipe.
    return {k: v for k, v in state.items() if isinstance(v, int | float | list) and k != "lr_lambdas"} | {
        "lr_lambdas": [None] * len(state["lr_lambdas"])
    }
