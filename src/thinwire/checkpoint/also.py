"""What a save holds beside the replica: the states of schedulers, samplers and random generators of a loop.

also-rankR.json           a worker's own states, by name
also-rankR.safetensors    the tensors in them

A state is written as plain values and tensors, never by pickle. What JSON lacks has a tag: {"tuple": […]}, and
{"dict": [[key, value], …]} for keys of any plain type.
"""

import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError, DamagedError, one_line
from thinwire.base.files import REMEDY, json_text, read_json, read_tensors, understood
from thinwire.checkpoint.saves import Files, copied

log = logging.getLogger("thinwire")

Also = Mapping[str, Any]
"""By name, objects with `state_dict` and `load_state_dict`, or torch.Generators."""
_DICTS = {"dict": dict, "counter": Counter}
"""Tags of dicts; a scheduler's milestones are a Counter."""


class RandomState:
    """The state of Python's, numpy's and torch's global random generators, for `replica.save(…, also=…)`."""

    def state_dict(self) -> dict[str, Any]:
        """The generators' states, as plain values and tensors."""
        numpy: dict[str, Any] = np.random.get_state(legacy=False)
        rest = [int(numpy["state"]["pos"]), int(numpy["has_gauss"]), float(numpy["gauss"])]
        keys = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
        state = {"python": random.getstate(), "numpy": [keys, *rest], "torch": torch.get_rng_state()}
        return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def check(also: Also | None) -> None:
    """Refuse what has no state."""
    for name, each in (also or {}).items():
        if not isinstance(name, str):
            raise ConfigError(f"`also` has the key {name!r}, which is not a name: give a dict of names and objects")
        has_state = callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
        if not (has_state or isinstance(each, torch.Generator)):
            raise ConfigError(
                f"`also`={{{name!r}: …}} is {type(each).__name__}, which has no state_dict() and load_state_dict(); "
                "give a scheduler, a sampler, a torch.Generator, thinwire.RandomState() or an object with these two"
            )


def captured(also: Also | None, rank: int) -> Files:
    """This worker's files; none without `also`."""
    if not also:
        return {}
    check(also)
    tensors: dict[str, Tensor] = {}
    plain = {name: _plain(_state_of(each), name, tensors) for name, each in also.items()}
    return {f"also-rank{rank}.json": json_text(plain), f"also-rank{rank}.safetensors": copied(tensors)}


def _state_of(each: Any) -> Any:
    return each.get_state() if isinstance(each, torch.Generator) else each.state_dict()


class Found:
    """The states in a save for what is given; refused before anything is loaded if one is missing."""

    def __init__(self, folder: Path, also: Also | None, rank: int, same_size: bool) -> None:
        """Where the world has another size, all workers take rank 0's."""
        check(also)
        self.also = also or {}
        self.file = folder / f"also-rank{rank if same_size else 0}.json"
        self.states: dict[str, Any] = read_json(self.file) if self.file.is_file() else {}
        if missing := [name for name in self.also if name not in self.states]:
            raise ConfigError(f"`{folder}` holds no state of {missing[0]!r}, as `also` asks; {self._there()}")
        if rank:
            return
        if left := [name for name in self.states if name not in self.also]:
            log.warning("the save also holds the state of %s, which is not loaded: give it in `also`", ", ".join(left))
        if self.also and not same_size:
            log.info("the save is of another number of workers: all take rank 0's state of %s", ", ".join(self.also))

    def _there(self) -> str:
        return f"there are {', '.join(map(repr, self.states))}" if self.states else "it was saved without `also`"

    def load(self) -> None:
        """Give each object its state."""
        if not self.also:
            return
        tensors = read_tensors(self.file.with_suffix(".safetensors"))
        with understood(self.file):
            states = {name: _value(self.states[name], tensors) for name in self.also}
        for name, each in self.also.items():
            try:
                (each.set_state if isinstance(each, torch.Generator) else each.load_state_dict)(states[name])
            except Exception as error:
                raise ConfigError(
                    f"the state of {name!r} in `{self.file}` is not one of {type(each).__name__} ({one_line(error)}); "
                    "give an object like the one that was saved"
                ) from error


def _plain(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A state for JSON; its tensors are added to `tensors`, by their place in the state."""
    if type(value) in (dict, OrderedDict, Counter):
        pairs = [[_plain(k, place, tensors), _plain(v, f"{place}.{k}", tensors)] for k, v in value.items()]
        return {"counter" if type(value) is Counter else "dict": pairs}
    if type(value) in (list, tuple):
        parts = [_plain(part, f"{place}.{i}", tensors) for i, part in enumerate(value)]
        return {"tuple": parts} if type(value) is tuple else parts
    if type(value) is Tensor:
        tensors[place] = value
        return {"tensor": place}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"the state of {place.partition('.')[0]!r} in `also` cannot be saved: `{place}` is {type(value).__name__}, and "
        "a save holds plain values, lists, tuples, dicts and tensors, since nothing else can be loaded without running "
        "code from the file; give an object whose state_dict() has only these"
    )


def _value(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state again."""
    if isinstance(plain, list):
        return [_value(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, content),) = plain.items()
    if tag == "tensor":
        if content not in tensors:
            raise DamagedError(f"the save is damaged, it lacks the tensor {content!r}; {REMEDY}")
        return tensors[content]
    if tag == "tuple":
        return tuple(_value(part, tensors) for part in content)
    return _DICTS[tag]({_value(k, tensors): _value(v, tensors) for k, v in content})
