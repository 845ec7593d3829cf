"""The folder of a save: the parts of a run in safetensors and JSON.

state.json                       what is the same on all workers, and what those of another world go on from
model.safetensors                the model; model-rankR where groups hold different ones, R a group's first rank
optimizer.safetensors / .json    the state of all optimizers, likewise
method.safetensors               the method's tensors, likewise
averageN.safetensors             the Nth moving average, if there are any; averageN-rankR where groups differ
worker-rankR.json                a worker's own counters, ledger and scale
worker-rankR.safetensors         a worker's own tensors, such as gradients it has not sent yet
also-rankR.json / .safetensors   a worker's states of what else was saved, such as a scheduler
manifest.json                    size and checksum of all of them

Whatever is read is compared with what such a file may hold, before memory is taken for what it claims.
"""

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError, DamagedError
from thinwire.base.files import REMEDY, header, json_text, read_json, read_tensors, understood
from thinwire.base.schema import ANY, COUNT, FIGURE, FLAG, NUMBER, POSITIVE, TEXT, Row, wrong
from thinwire.base.schema import like as like_now
from thinwire.checkpoint import also as beside
from thinwire.checkpoint.also import Also
from thinwire.checkpoint.saves import Files, copied, newest, verify
from thinwire.checkpoint.state import Part, RunState, apart, held_parameters, mapped, together
from thinwire.comm.fsdp import local
from thinwire.config.settings import describe
from thinwire.exchange.parts import Saved
from thinwire.factor.layers import FORMS
from thinwire.factor.moments import LINEAR, QUADRATIC
from thinwire.methods.registry import name_of
from thinwire.methods.runner import Runner

FORMAT = 7
_SPENT = (None, {"seconds": NUMBER})
_TIMES = {"steps": COUNT} | dict.fromkeys(
    ("whole?", "in_steps?", "waiting_in_steps?", "decomposing?", "after_steps?"), _SPENT
)
_OF_BOTH = {
    "traffic": {"rows": [Row([TEXT] * 3 + [NUMBER] * 3)], "times": {str: _TIMES}, "kernel": {str: [NUMBER]}},
    "scaler": (None, {str: NUMBER}),
}
STATE = _OF_BOTH | {
    "format": ANY,
    "method_name": TEXT,
    "config": {str: ANY},
    "world_size": POSITIVE,
    "in_sync": FLAG,
    "groups": [[COUNT]],
    "optimizers": [TEXT],
    "method": {"step": COUNT, "phase": TEXT, "index": COUNT, "events": [{str: ANY}], "shape": {str: ANY}},
    "baseline": {str: NUMBER},
    "data?": {
        "samples": POSITIVE,
        "seed": COUNT,
        "shuffle": FLAG,
        "next": COUNT,
        "commits": COUNT,
        "open": [COUNT],
        "done": [COUNT],
        "trained": [COUNT],
        "pending": [[COUNT]],
        "groups": [[COUNT]],
    },
}
WORKER = _OF_BOTH | {"method": {"forwards": COUNT, "idle?": COUNT, "observed": Row([FIGURE] * 2)}}
_OPTIMIZERS = {"state": {str: ANY}, "param_groups": [{str: ANY}]}
_NESTED = "nested."
"""Begins the names of tensors that are in lists of an optimizer's state, as SOAP's and Shampoo's matrices."""


# Writing.


def capture(state: RunState) -> Files:
    """This worker's files of a save, copied to memory; collective."""
    method, rank = state.method, state.method.topology.rank
    common, worker = _about(method), dict[str, Any]()
    files, tensors = Files(), dict[str, Tensor]()
    for part in state.parts:
        if part.others is not None:
            common[part.name] = part.others()
        value = part.read()
        if part.owner == "world":
            common.setdefault(part.name, value)
        elif part.owner == "worker":
            worker[part.name], own = apart(value)
            tensors |= own
        else:
            files |= _of_group(method, part, value)
            if part.name == "method":
                common["method"] = apart(value)[0]
    if rank == 0:
        files["state.json"] = json_text(common)
    worker["method"] = worker.pop("own")
    files[f"worker-rank{rank}.json"] = json_text(worker)
    files[f"worker-rank{rank}.safetensors"] = copied(tensors)
    _lay_out_in_rows(method)
    # Both a run that goes on and one that resumes continue with a fresh wrapper, so both sum in the same order.
    method.gradients.rewrap()
    return files


def _about(method: Runner) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method_name": name_of(method.config),
        "config": describe(method.config),
        "world_size": method.topology.world_size,
        "in_sync": _is_whole(method),
        "groups": _groups(method),
        "optimizers": _kinds(method),
    }


def _of_group(method: Runner, part: Part, value: Any) -> Files:
    """What this worker writes of what each group has: nothing, if another one does."""
    is_average = part.resumed == "mean"
    odd = next((name for name, each in value.items() if not isinstance(each, Tensor)), None)
    if odd and (is_average or part.name == "model"):
        raise ConfigError(f"{odd!r} is a module's extra state, not a tensor: it cannot be saved without pickle")
    is_whole = _is_whole(method)
    if is_average and not method.wire.is_sharded:
        is_whole = method.wire.agree(list(value.values()), "checksums")
    rank = method.topology.rank
    if rank != (0 if is_whole else method.topology.group[0]):
        return {}
    stem = part.name if is_whole else f"{part.name}-rank{rank}"
    if part.name == "optimizer":
        plain, tensors = _optimizers_apart(value)
        return {f"{stem}.safetensors": copied(tensors), f"{stem}.json": json_text(plain)}
    return {f"{stem}.safetensors": copied(apart(value)[1])}


def _optimizers_apart(value: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Tensors by their own names, but for those in lists."""
    tensors = {name: t for name, t in value["state"].items() if isinstance(t, Tensor)}
    rest = {name: apart(each, f"{_NESTED}{name}") for name, each in value["state"].items() if name not in tensors}
    for _, nested in rest.values():
        tensors |= nested
    return {"state": {name: plain for name, (plain, _) in rest.items()}, "param_groups": value["param_groups"]}, tensors


def _lay_out_in_rows(method: Runner) -> None:
    """Let a run that goes on hold its matrices as one that resumes will.

    Products of others, such as SOAP's bases, come in another layout, and are rounded in another way in it.
    """
    for state in (state for optimizer in method.optimizers for state in optimizer.state.values()):
        nested = {name: value for name, value in state.items() if isinstance(value, list | tuple)}
        state.update(mapped(nested, Tensor.contiguous))


def _groups(method: Runner) -> list[list[int]]:
    return [sorted(group) for group in method.topology.groups]


def _is_whole(method: Runner) -> bool:
    """Whether one worker holds all that the others do."""
    return method.in_sync and not method.wire.is_sharded


def _kinds(method: Runner) -> list[str]:
    """The optimizers' classes: each keeps state of its own kind."""
    return [type(optimizer).__name__ for optimizer in method.optimizers]


# Reading.


def load(state: RunState, folder: Path | str, *, check: bool = True, also: Also | None = None) -> None:
    """Fill the parts of a run from a save, the model's shape first; collective.

    Checksums are compared first, unless they were already.
    """
    method, folder = state.method, newest(folder)
    if check:
        verify(folder, method.wire)
    about = read_json(folder / "state.json", schema=STATE)
    _check(method, about)
    rank, same_size = method.topology.rank, about["world_size"] == method.topology.world_size
    states = beside.Found(folder, also, rank, same_size)
    suffix = "" if about["in_sync"] else f"-rank{_predecessor(method, about['groups'])}"
    model = folder / f"model{suffix}.safetensors"

    def load_values() -> None:
        state.fill({"model": read_tensors(model, expected=state.read("model")["model"])})
        _load_optimizers(state, folder / f"optimizer{suffix}.json")

    shared = together(about["method"], _on_device(method, folder / f"method{suffix}.safetensors"))
    method.drop_pending()
    own_state = {part: like_now(kept, fresh=method.step == 0) for part, kept in method.state_dict().items()}
    _refuse(folder / "state.json", wrong(shared, own_state["shared"], "method"))
    if shared["phase"] not in {phase.name for phase in method.timetable[shared["index"] :][:1]}:
        _refuse(folder / "state.json", f"phase {shared['index']} is not {shared['phase']!r}")
    _check_ranks(folder, shared, model)
    workers = _Workers(method, folder, about["world_size"], own_state["local"])
    own = rank if about["groups"] == _groups(method) else None
    with understood(folder):
        method.load_state_dict(Saved(shared, workers, own, load_values))
        there = read_json(folder / f"worker-rank{rank}.json", schema=WORKER) if same_size else about
        for part in [*state.parts]:
            if part.owner == "world":
                state.fill({part.name: about[part.name]} if part.name in about else {})
            elif part.others is not None:
                state.fill({part.name: there[part.name]})
            elif part.resumed == "mean":
                state.fill({part.name: _mean_over_groups(method, about, folder / part.name, part.read())})
    states.load()
    here = len(state.averages)
    if [*folder.glob(f"average{here}.safetensors"), *folder.glob(f"average{here}-rank*")]:
        warnings.warn(
            f"{folder} holds more moving averages than the {here} here; make thinwire.EMA(replica) before load() to "
            "continue it",
            stacklevel=3,
        )
    if (state.data is None) != ("data" not in about):
        remedy = "make an ElasticSampler before load() to go on there" if state.data is None else "it begins anew"
        has = "holds a" if state.data is None else "holds no"
        warnings.warn(f"{folder} {has} place of a sampler in the data: {remedy}", stacklevel=3)
    method.gradients.rewrap()


def _check(method: Runner, about: Mapping[str, Any]) -> None:
    name = name_of(method.config)
    if about["format"] != FORMAT:
        raise ConfigError(
            f"the save has format {about['format']}, this version reads {FORMAT}; use the version that wrote it"
        )
    if about["method_name"] != name:
        raise ConfigError(f"the save is of method {about['method_name']!r}, attached is {name!r}; attach the same one")
    if about["optimizers"] != _kinds(method):
        raise ConfigError(
            f"the save is of a run trained by {', '.join(about['optimizers'])}, attached is "
            f"{', '.join(_kinds(method))}, which keeps other state; attach with the same optimizers"
        )
    _check_groups(about)
    own = describe(method.config)
    changed = sorted(k for k in own if own[k] != about["config"].get(k) and k != "group_size")
    if changed:
        differences = ", ".join(f"{k}={about['config'].get(k)!r} there, {own[k]!r} here" for k in changed)
        raise ConfigError(f"the save was made with another config: {differences}; attach with the same one")


def _predecessor(method: Runner, groups: Sequence[Sequence[int]]) -> int:
    """The first rank of the group whose model this one goes on from, where groups have trained apart.

    Groups that are more than before share one. Of those that nobody goes on from, the steps since the last average
    are lost, as if they had died.
    """
    topology = method.topology
    if method.wire.is_sharded:
        if groups != _groups(method):
            raise ConfigError(
                f"the save is of shards in groups {groups}, here are {_groups(method)}: resume a sharded model with as "
                "many workers and groups"
            )
        return topology.rank
    left = len(groups) - len(topology.groups)
    if left > 0 and method.topology.rank == 0:
        warnings.warn(
            f"the save is of {len(groups)} groups that train apart, here are {len(method.topology.groups)}: what the "
            f"last {left} trained since the last average is lost",
            stacklevel=4,
        )
    return groups[method.topology.group_index % len(groups)][0]


class _Workers(Sequence[dict[str, Any]]):
    """The local parts of a save by rank, read when they are looked at: most workers need only their own."""

    def __init__(self, method: Runner, folder: Path, count: int, schema: Any) -> None:
        self.method, self.folder, self.workers, self.schema = method, folder, count, schema

    def __len__(self) -> int:
        return self.workers

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self.workers:
            raise IndexError(rank)
        tensors = _on_device(self.method, self.folder / f"worker-rank{rank}.safetensors")
        file = self.folder / f"worker-rank{rank}.json"
        found = together(read_json(file, schema=WORKER)["method"], tensors)
        _refuse(file, wrong(found, self.schema, "method"))
        return found


def _mean_over_groups(
    method: Runner, about: Mapping[str, Any], stem: Path, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What each group had, as it was; groups that are not those that saved it start from the mean of theirs."""
    groups = about["groups"]
    files = [stem.with_name(f"{stem.name}-rank{group[0]}.safetensors") for group in groups]
    if (whole := stem.with_name(f"{stem.name}.safetensors")).is_file():
        return read_tensors(whole, expected=expected)
    if not files[0].is_file():
        raise ConfigError(f"{stem.parent} holds no moving average; make thinwire.EMA(replica) after load()")
    if groups == _groups(method):
        own = stem.with_name(f"{stem.name}-rank{_predecessor(method, groups)}.safetensors")
        return read_tensors(own, expected=expected)
    found = [read_tensors(file, expected=expected) for file in files]
    weights = torch.tensor([len(group) / about["world_size"] for group in groups])
    return {name: _mean([tensors[name] for tensors in found], weights) for name in found[0]}


def _mean(tensors: list[Tensor], weights: Tensor) -> Tensor:
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.einsum("g,g...->...", weights.to(tensors[0].dtype), torch.stack(tensors))


def _on_device(method: Runner, file: Path) -> dict[str, Tensor]:
    """A file's tensors where the model is; none if there is no such file."""
    device = next(method.model.parameters()).device
    return mapped(read_tensors(file), lambda t: t.to(device)) if file.is_file() else {}


def _load_optimizers(state: RunState, file: Path) -> None:
    """Fill the optimizers, where the model has its shape."""
    saved, tensors = read_json(file, schema=_OPTIMIZERS), read_tensors(file.with_suffix(".safetensors"))
    nested = {name: tensors.pop(name) for name in [*tensors] if name.startswith(_NESTED)}
    values = {"state": {**together(saved["state"], nested), **tensors}, "param_groups": saved["param_groups"]}
    held = held_parameters(state.method)
    _check_optimizers(file, state.method, held, values)
    state.fill({"optimizer": values})
    for optimizer, parameters in zip(state.method.optimizers, held, strict=True):
        _check_complete(file, optimizer, parameters)


# What files may hold.


def _refuse(file: Path, what: str | None) -> None:
    if what:
        raise DamagedError(f"`{file}` is damaged, {what}; {REMEDY}")


def _check_ranks(folder: Path, shared: Mapping[str, Any], model: Path) -> None:
    """Layers get no other rank than their factors in the file have: a rank alone could take any amount of memory."""
    ranks = shared["shape"].get("ranks")
    if not ranks:
        return
    firsts = tuple(f"_{form[0]}" for form in FORMS.values())
    there = {name: shape[1] for name, shape in header(model).items() if name.endswith(firsts) and len(shape) == 2}
    for key, rank in ranks.items():
        found = [there[key + first] for first in firsts if key + first in there]
        if rank not in (found or there.values()):  # a tied weight is there under one of its names
            _refuse(folder / "state.json", f"the rank {rank!r} of {key!r} is not that in `{model.name}`")


def _check_groups(about: Mapping[str, Any]) -> None:
    """Every worker is in one group."""
    ranks = sorted(rank for group in about["groups"] for rank in group)
    if len(ranks) != about["world_size"] or ranks != [*range(len(ranks))] or not all(about["groups"]):
        raise DamagedError(f"the save is damaged, its groups are not those of {about['world_size']} workers; {REMEDY}")


def _check_optimizers(
    file: Path, method: Runner, held: Sequence[Sequence[nn.Parameter]], values: Mapping[str, Any]
) -> None:
    """State and settings are those of optimizers like these."""
    groups = method.optimizers.groups
    if len(values["param_groups"]) != len(groups):
        raise ConfigError(
            f"{file} holds {len(values['param_groups'])} parameter groups, the optimizers here have {len(groups)}; "
            "build them as they were when it was saved"
        )
    for key, value in values["state"].items():
        found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(.+)", key)
        if not found or int(found[1]) >= len(held) or int(found[2]) >= len(held[int(found[1])]):
            raise ConfigError(f"{file} holds state {key!r} of a parameter that is not here; build the same optimizers")
        _check_state(file, held[int(found[1])][int(found[2])], found[3], value)
    for (_, group), settings in zip(groups, values["param_groups"], strict=True):
        _check_settings(file, group, settings)


def _check_state(file: Path, p: nn.Parameter, name: str, value: Any) -> None:
    """A moment is a tensor of numbers in the parameter's shape, or absent."""
    is_moment = name in LINEAR | QUADRATIC
    is_numbers = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if is_moment and value is not None and not is_numbers:
        _refuse(file, f"{name!r} is not a tensor of floating-point numbers")
    if is_moment and isinstance(value, Tensor) and value.dim() and value.shape != local(p).shape:
        raise ConfigError(
            f"{file} holds {name!r} of shape {list(value.shape)} for a parameter of shape "
            f"{list(local(p).shape)}; build model and optimizers as they were when it was saved"
        )


def _check_complete(file: Path, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """The state that torch's own optimizers would otherwise miss in the next step."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known: dict[tuple[int, int, torch.dtype], Mapping[str, Any]] = {}
    for p in parameters:
        group, state = groups[id(p)], optimizer.state.get(p, {})
        key = id(group), p.dim(), p.dtype
        if key not in known:
            known[key] = _state_of(optimizer, group, p, file)
        for name, wanted in known[key].items() if state else ():
            there = state.get(name, "missing")
            # A momentum that has not begun is None.
            if there is not None and getattr(there, "ndim", None) != getattr(wanted, "ndim", None):
                _refuse(file.with_suffix(".safetensors"), f"a parameter of shape {list(p.shape)} has no valid {name!r}")


def _state_of(optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter, file: Path) -> Mapping[str, Any]:
    """What a parameter like this one has after a step; nothing for an optimizer that is not torch's own."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return {}
    settings = {name: group[name] for name in inspect.signature(kind).parameters if name in group and name != "params"}
    trial = nn.Parameter(p.new_zeros([1] * p.dim()))
    trial.grad = torch.zeros_like(trial)
    try:
        once = kind([trial], **settings)
        once.step()
    except (ArithmeticError, ValueError) as error:
        _refuse(file, f"{kind.__name__} cannot step with its settings ({error})")
    except (RuntimeError, TypeError):
        return {}
    return once.state[trial]


def _check_settings(file: Path, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """The settings of a parameter group are of the kind they have here, and do not replace its parameters."""
    if "params" in saved:
        _refuse(file, "it has 'params', which are the model's")
    _refuse(file, wrong(saved, {f"{name}?": _setting(value) for name, value in group.items()}, "param_groups"))


def _setting(value: Any) -> Any:
    """The kind of a setting of a parameter group; where it is None, most may come."""
    if isinstance(value, bool):
        return FLAG
    if isinstance(value, int | float | Tensor):
        return FIGURE
    if isinstance(value, tuple | list):
        return Row([_setting(each) for each in value])
    return TEXT if isinstance(value, str) else (None, FLAG, FIGURE, TEXT)
