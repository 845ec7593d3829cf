"""What a run consists of: one tree of parts. A save, an undo and a hand-over to a group that joins are walks over it.

    part         who has one     resumed by others    a group joins    an undo    what it is
    model        each group      same                 same             yes        parameters and buffers
    optimizer    each group      same                 same             yes        state, and settings by group
    method       each group      same                 same             yes        step, phase, ranks, outer values
    own          each worker     dropped              dropped          yes        what is not sent yet, and counters
    averageN     each group      mean                 same             no         the Nth moving average
    scaler       each worker     same                 kept             no         scale and growth of the GradScaler
    traffic      each worker     mean                 kept             no         the ledger
    baseline     the world       same                 same             no         bytes that all-reduce would have sent
    data         the world       same                 same             no         samples that count, and whose they are

A part that is the same is what one of the groups before had; one that is kept stays where it is, and a worker that
comes begins with none. Of an optimizer's settings a group that joins takes what the optimizer counts; scripts and
schedulers bring the others, such as rates. Of what is dropped, the codes of gradients divide what they can among the
workers that resume, and counters are those of the first worker. An undo takes back what groups change together.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError, DamagedError
from thinwire.base.files import REMEDY
from thinwire.checkpoint import loads
from thinwire.checkpoint.dealing import Deal
from thinwire.comm.fsdp import local, whole_of
from thinwire.comm.sharded import like_whole
from thinwire.exchange.parts import Saved
from thinwire.factor.layers import Shape
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.runner import Runner


@dataclass(frozen=True)
class Part:
    """Something that belongs to a run."""

    name: str
    owner: Literal["world", "group", "worker"]
    """Who has one of its own."""
    resumed: Literal["same", "mean", "dropped"]
    """What becomes of it in other groups than those of a save."""
    joined: Literal["same", "kept", "dropped"]
    """What becomes of it in a group that joins a run."""
    read: Callable[[], Any]
    """What it is now, as plain values and the tensors themselves."""
    fill: Callable[[Any], None] | None
    """Make it what was read; None where the method does, in `load_state_dict`."""
    others: Callable[[], Any] | None = None
    """What the workers of another world resume from, of what each worker has; collective."""


class RunState:
    """The parts of a run, as this worker has them."""

    def __init__(
        self,
        method: Runner,
        scaler: Any = None,
        *,
        read_baseline: Callable[[], dict[str, int]] = dict,
        begin_baseline: Callable[[dict[str, int]], None] = lambda earlier: None,
    ) -> None:
        self.method, self.scaler = method, scaler
        self.read_baseline, self.begin_baseline = read_baseline, begin_baseline
        self.averages: list[nn.Module] = []
        """Moving averages of the model."""
        self.data: Deal | None = None
        """Whose turn which samples are, if a sampler deals them."""
        self._about_data: dict[str, Any] = {}
        self.processes: Callable[[], list[str]] = lambda: [str(rank) for rank in self.method.topology.world]
        """What workers are called that may be lost, by rank."""
        self._arrived: dict[str, Any] = {}
        """What was handed over before it was made here."""

    @property
    def parts(self) -> Iterator[Part]:
        """All of them, in the order in which they are read."""
        method, wire = self.method, self.method.wire
        found = functools.cache(method.state_dict)  # both parts of it are of the same moment
        yield Part("method", "group", "same", "same", lambda: found()["shared"], None)
        yield Part("own", "worker", "dropped", "dropped", lambda: found()["local"], None)
        yield Part("model", "group", "same", "same", lambda: _distinct(method.model), self._fill_model)
        yield Part("optimizer", "group", "same", "same", self._read_optimizers, self._fill_optimizers)
        for number, average in enumerate(self.averages):
            read, fill = functools.partial(_distinct, average), functools.partial(_fill, average)
            yield Part(f"average{number}", "group", "mean", "same", read, fill)
        read_scale = self.scaler.state_dict if self.scaler is not None else lambda: None
        yield Part("scaler", "worker", "same", "kept", read_scale, self._fill_scaler, read_scale)
        own = wire.ledger.state, wire.ledger.load_state
        yield Part("traffic", "worker", "mean", "kept", *own, lambda: wire.node_mean().state())
        yield Part("baseline", "world", "same", "same", self.read_baseline, self.begin_baseline)
        if (data := self.data) is not None:
            yield Part("data", "world", "same", "same", lambda: self._about_data | data.read(), self._deal, self._dealt)

    def read(self, *names: str) -> dict[str, Any]:
        """These parts."""
        return {part.name: part.read() for part in self.parts if part.name in names}

    def fill(self, values: Mapping[str, Any]) -> None:
        """Make these parts what was read."""
        for part in self.parts:
            if part.fill is not None and part.name in values:
                part.fill(values[part.name])

    def add_average(self, average: nn.Module) -> None:
        """From now on this moving average belongs to the run; it goes on from the one that was handed over."""
        if (arrived := self._arrived.pop(f"average{len(self.averages)}", None)) is not None:
            _fill(average, arrived)
        self.averages.append(average)

    def add_data(self, about: dict[str, Any]) -> Deal:
        """From now on samples are dealt, as in the run that was joined or from the first on; `about` says of what."""
        if self.data is not None:
            raise ConfigError("this replica has an ElasticSampler: give both loops the same one")
        self._about_data, topology = about, self.method.topology
        self.data = Deal(topology.rank, topology.world_size)
        if (arrived := self._arrived.pop("data", None)) is not None:
            self._deal(arrived)
        return self.data

    def _deal(self, queue: Mapping[str, Any]) -> None:
        """Go on with the queue of a run that was joined, or of a save."""
        for name, here in self._about_data.items():
            if queue[name] != here:
                raise ConfigError(
                    f"`{name}`={here!r} of ElasticSampler here, {queue[name]!r} in the run that goes on: use the same"
                )
        assert self.data is not None
        topology = self.method.topology
        if "done" not in queue:
            self.data.fill(queue, topology.rank, topology.world_size)
            return
        processes, heirs = self.processes(), dict[int, str]()
        for own, group in zip(queue["groups"], topology.groups, strict=False):
            heirs |= {rank: processes[group[number % len(group)]] for number, rank in enumerate(own)}
        self.data.resume(queue, heirs, topology.rank, topology.world_size)

    def _dealt(self) -> dict[str, Any]:
        """For a save; collective."""
        assert self.data is not None
        rank, wire = self.method.topology.rank, self.method.wire
        rows = wire.all_gather_scalars([self.data.done[rank], self.data.trained], "control")
        groups = [sorted(group) for group in self.method.topology.groups]
        return self._about_data | self.data.saved(rows, self.processes()) | {"groups": groups}

    # A hand-over.

    def packed(self, **more: Any) -> Tensor:
        """What a group that joins is given, and more, as bytes."""
        found = {part.name: part.read() for part in self.parts if part.joined == "same" or part.name == "own"}
        found["own"] = {name: value for name, value in found["own"].items() if not apart(value)[1]}
        settings = found["optimizer"]["param_groups"]
        for (optimizer, _), group in zip(self.method.optimizers.groups, settings, strict=True):
            for name in inspect.signature(type(optimizer)).parameters:  # set by scripts and schedulers
                group.pop(name, None)
        return pack(found | more)

    def take(self, packed: Tensor) -> dict[str, Any]:
        """Be what the group is that packed this, with nothing left unsent; returns what else was packed."""
        whole, method = unpack(packed), self.method
        device = next(method.model.parameters()).device
        shared = mapped(whole.pop("method"), lambda t: t.to(device))
        own = whole.pop("own") | {"gradients": {"buckets": []}}
        values = {name: whole.pop(name) for name in ("model", "optimizer")}
        method.load_state_dict(Saved(shared, [own], None, lambda: self.fill(values), stays=True))
        method.forwards = method.step
        self.fill(whole)
        here = {part.name for part in self.parts}
        self._arrived = {name: v for name, v in whole.items() if name not in here}
        return whole

    # How parts are read and filled.

    def _fill_model(self, values: dict[str, Any]) -> None:
        with loads.ignored():
            _fill(self.method.model, values)

    def _read_optimizers(self) -> dict[str, Any]:
        with self.method.context.users_optimizers():
            return read_optimizers(self.method)

    def _fill_optimizers(self, values: dict[str, Any]) -> None:
        with self.method.context.users_optimizers():
            fill_optimizers(self.method, values)

    def _fill_scaler(self, scale: dict[str, Any] | None) -> None:
        if self.scaler is not None and scale:
            self.scaler.load_state_dict(scale)


def _distinct(model: nn.Module) -> dict[str, Any]:
    """A model's state, with one name for each tensor: tied weights are there once."""
    kept: dict[Any, tuple[str, Any]] = {}
    for name, t in model.state_dict().items():
        kept.setdefault((t.data_ptr(), t.shape) if isinstance(t, Tensor) and t.numel() else name, (name, t))
    return dict(kept.values())


def _fill(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Load a state with tied weights under all their names again; one of another model is refused."""
    own = model.state_dict()
    tensors = {name: t for name, t in own.items() if isinstance(t, Tensor)}
    by_place = {t.data_ptr(): values[name] for name, t in tensors.items() if name in values}
    tied = {name: by_place.get(t.data_ptr(), t if t.numel() == 0 else None) for name, t in tensors.items()}
    found = {name: values.get(name, tied.get(name)) for name in own}
    wrong = sorted({name for name, t in found.items() if t is None} ^ (values.keys() - own.keys()))
    if wrong:
        raise ConfigError(f"the save is of another model: {wrong[0]!r} is in only one of the two; build the same model")
    model.load_state_dict(found)


# Optimizers.


def held_parameters(method: Runner) -> list[list[nn.Parameter]]:
    """This model's parameters, by the optimizer that holds them, which may train other models too."""
    own = {id(whole_of(p)) for p in method.model.parameters()}
    return [[p for p in Optimizers(o).parameters if id(p) in own] for o in method.optimizers]


def read_optimizers(method: Runner) -> dict[str, Any]:
    """State by OPTIMIZER.PARAMETER.NAME, both counted from 0, and the settings of every parameter group.

    Settings that are no plain values, such as functions, are the script's.
    """
    state = {
        f"{number}.{i}.{name}": local(value) if isinstance(value, Tensor) else value
        for number, (optimizer, held) in enumerate(zip(method.optimizers, held_parameters(method), strict=True))
        for i, p in enumerate(held)
        for name, value in optimizer.state.get(p, {}).items()
    }
    settings: list[dict[str, Any]] = []
    for _, group in method.optimizers.groups:
        items = {name: v.item() if isinstance(v, Tensor) else v for name, v in group.items() if name != "params"}
        settings.append({name: value for name, value in items.items() if _is_plain(value)})
    return {"state": state, "param_groups": settings}


@torch.no_grad()
def fill_optimizers(method: Runner, values: Mapping[str, Any]) -> None:
    """Give the optimizers what was read, where the model has its shape; settings that are not there stay."""
    optimizers, held = method.optimizers, held_parameters(method)
    for optimizer, parameters in zip(optimizers, held, strict=True):
        for p in parameters:
            optimizer.state.pop(p, None)
    for key, value in values["state"].items():
        number, i, name = key.split(".", 2)
        _put_state(optimizers[int(number)], held[int(number)][int(i)], name, value)
    for (_, group), settings in zip(optimizers.groups, values["param_groups"], strict=True):
        for name, value in settings.items():
            now = group.get(name)
            if isinstance(now, Tensor):  # a compiled step holds it
                now.copy_(torch.as_tensor(value))
            else:
                group[name] = tuple(value) if isinstance(now, tuple) else value


def _put_state(optimizer: Optimizer, p: nn.Parameter, name: str, value: Any) -> None:
    """Set one value of a parameter's state in its own dtype: torch's `load_state_dict` rounds to the parameter's."""
    if not isinstance(value, Tensor):
        optimizer.state[p][name] = mapped(value, lambda t: t.to(p.device))
        return
    # Steps are on the CPU unless the optimizer's settings ask for them on the parameter's device.
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    kept = value.to(p.device) if value.dim() or on_device else value
    optimizer.state[p][name] = like_whole(kept, p) if kept.shape == local(p).shape else kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# An undo.


class Undo:
    """A copy of what groups may change together: the model, in its shape, its optimizers and the method.

    The very parameters come back, since the optimizers and others hold them.
    """

    def __init__(self, method: Runner) -> None:
        self.method = method
        self.state = mapped(method.state_dict(), _copy)
        self._shape = Shape(method.model)
        self._of, names = method.shape, ("layers", "kept", "decompositions", "found_ranks")
        self._found = {name: getattr(self._of, name) for name in names}
        self._values = [(t, t.requires_grad, _copy(t)) for t in (*method.model.parameters(), *method.model.buffers())]
        self._params = [list(group["params"]) for _, group in method.optimizers.groups]
        self._optimizers = mapped(read_optimizers(method), _copy)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back but the method's own state, which it has to load."""
        method = self.method
        self._shape.restore()
        vars(self._of).update(self._found)
        for t, trains, value in self._values:
            t.requires_grad_(trains).copy_(value)
        for (optimizer, group), params in zip(method.optimizers.groups, self._params, strict=True):
            for p in {*group["params"]} - {*params}:
                optimizer.state.pop(p, None)
            group["params"][:] = params
        fill_optimizers(method, self._optimizers)


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone()


# Trees of plain values and tensors.


def apart(state: Any, place: str = "") -> tuple[Any, dict[str, Tensor]]:
    """A tree of plain values and tensors as a plain one, with {"tensor": PLACE} for each, and the tensors by place."""
    if isinstance(state, Tensor):
        return {"tensor": place}, {place: state.contiguous()}
    if not isinstance(state, dict | list | tuple):
        return state, {}
    pairs = list(state.items()) if isinstance(state, dict) else list(enumerate(state))
    found = {key: apart(value, f"{place}.{key}" if place else str(key)) for key, value in pairs}
    tensors = {name: t for _, own in found.values() for name, t in own.items()}
    plain = {key: value for key, (value, _) in found.items()}
    return (plain if isinstance(state, dict) else list(plain.values())), tensors


def together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again."""
    if isinstance(plain, dict):
        if plain.keys() == {"tensor"}:
            if not isinstance(plain["tensor"], str) or plain["tensor"] not in tensors:
                raise DamagedError(f"the save is damaged, it lacks the tensor {plain['tensor']!r}; {REMEDY}")
            return tensors[plain["tensor"]]
        return {key: together(value, tensors) for key, value in plain.items()}
    return [together(value, tensors) for value in plain] if isinstance(plain, list) else plain


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree with its tensors changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    return [mapped(value, change) for value in tree] if isinstance(tree, list | tuple) else tree


def pack(tree: Any) -> Tensor:
    """A tree of plain values and tensors as bytes, which hold no code."""
    plain, tensors = apart(tree)
    text = json.dumps(plain).encode()
    values = save({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()})
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text + values), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """The tree again, on the CPU."""
    raw = packed.numpy().tobytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return together(json.loads(raw[8:end]), load(raw[end:]))
