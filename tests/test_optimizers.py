"""Several optimizers for one model, wrapped ones, and ones that step without being attached."""

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gang
import needs
import small
import thinwire
from thinwire.base.errors import ConfigError, ThinwireError

METHODS: dict[str, Callable[[], Any]] = {
    "allreduce": thinwire.AllReduce,
    "int8": lambda: thinwire.AllReduce(wire="int8"),
    "ab-paper": lambda: small.ab(moments="carry"),
    "ab-paper reset": lambda: small.ab(merge="trained"),
    "oialr": lambda: thinwire.OIALR(total_steps=small.STEPS, factor_at=4, redecompose=5, cutoff=0.3),
    "daso": lambda: thinwire.DASO(total_steps=small.STEPS, warmup=5, cooldown=5),
    "localsgd": lambda: thinwire.LocalSGD(every=4, moments="average"),
    "diloco": lambda: thinwire.DiLoCo(every=4),
    "powersgd": lambda: thinwire.PowerSGD(rank=2),
    "topk": lambda: thinwire.TopK(density=0.1),
    "onebit": thinwire.OneBit,
}
needs_muon = needs.part("Muon", None if hasattr(torch.optim, "Muon") else "torch.optim has it from 2.9 on")


def matrices_and_rest(model: nn.Module, kind: str) -> list[Optimizer]:
    """One optimizer for the hidden matrices, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("middle")]
    inside = {id(p) for p in matrices}
    first = SGD(matrices, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.Muon(matrices, lr=0.02)
    return [first, AdamW([p for p in model.parameters() if id(p) not in inside], lr=3e-3)]


def two_step(replica: Any, optimizers: list[Optimizer], rank: int, number: int) -> None:
    x, y = small.batch(rank, number)
    loss = F.cross_entropy(replica(x), y)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers if number % 2 else optimizers[::-1]:  # in whatever order
        optimizer.step()


def train_by_two(rank: int, kind: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config in METHODS.items():
        model = small.net()
        optimizers = matrices_and_rest(model, kind)
        replica = thinwire.attach(model, optimizers, config())
        together = []
        for number in range(small.STEPS):
            two_step(replica, optimizers, rank, number)
            if replica.in_sync:
                together.append([small.model_bits(model), *map(small.optimizer_bits, optimizers)])
            if number == 5:
                replica.save(Path(folder) / name)
        found[name] = {"together": together, "step": replica.step, "end": small.model_bits(replica.finish())}
        model = small.net(seed=1)
        optimizers = matrices_and_rest(model, kind)
        resumed = thinwire.attach(model, optimizers, config())
        resumed.load(Path(folder) / name)
        for number in range(6, small.STEPS):
            two_step(resumed, optimizers, rank, number)
        found[name]["resumed"] = small.model_bits(resumed.finish())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param("sgd", marks=pytest.mark.slow), pytest.param("muon", marks=needs_muon)],
)
def test_two_optimizers_train_one_model_by_every_method(kind: str, tmp_path: Path) -> None:
    here, there = gang.run(train_by_two, 2, kind, str(tmp_path))
    for name, mine in here.items():
        assert mine["step"] == small.STEPS
        assert mine["together"] == there[name]["together"], name
        assert mine["end"] == there[name]["end"] == mine["resumed"] == there[name]["resumed"], name


def test_two_optimizers_train_as_one_with_two_groups() -> None:
    """At one worker by AllReduce and by AB, bit for bit."""
    for config in (thinwire.AllReduce, lambda: small.ab(moments="carry")):
        ends = []
        for split in (False, True):
            model = small.net()
            matrix, rest = model.middle.weight, [p for p in model.parameters() if p is not model.middle.weight]
            if split:
                optimizers: Any = [AdamW([matrix], lr=1e-3), AdamW(rest, lr=3e-3)]
            else:
                optimizers = [AdamW([{"params": [matrix], "lr": 1e-3}, {"params": rest, "lr": 3e-3}])]
            replica = thinwire.attach(model, optimizers, config())
            for number in range(small.STEPS):
                two_step(replica, optimizers, 0, number)
            ends.append(small.model_bits(replica.finish()))
        assert ends[0] == ends[1]


def attached(optimizer_of: Callable[[nn.Module], Any], config: Any = None) -> tuple[Any, nn.Module]:
    model = small.mlp()
    return thinwire.attach(model, optimizer_of(model), config or thinwire.AllReduce()), model


def test_a_trained_parameter_that_no_optimizer_holds_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'3\.weight' and 5 more .* attach\(model, \[first, second\]"):
        attached(lambda model: SGD(model[1].parameters(), lr=0.1))
    model = small.mlp()
    for p in list(model.parameters())[2:]:
        p.requires_grad_(False)
    thinwire.attach(model, SGD(model[1].parameters(), lr=0.1), thinwire.AllReduce())


def test_lists_of_optimizers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="no optimizer was given"):
        attached(lambda model: [])
    with pytest.raises(ConfigError, match=r"'1\.weight' is held by two"):
        attached(lambda model: [SGD(model.parameters(), lr=0.1), AdamW(model.parameters())])
    with pytest.raises(ConfigError, match="SparseAdam cannot be attached"):
        attached(lambda model: [SGD(model.parameters(), lr=0.1), torch.optim.SparseAdam(model.parameters())])
    with pytest.raises(ConfigError, match="holds none of the model's"):
        attached(lambda model: [SGD(model.parameters(), lr=0.1), SGD(small.mlp().parameters(), lr=0.1)])

    def twice(model: nn.Module) -> list[Optimizer]:
        return [SGD(model.parameters(), lr=0.1)] * 2

    with pytest.raises(ConfigError, match="given twice"):
        attached(twice)


def test_an_optimizer_that_steps_twice_before_the_other_is_an_error_by_name() -> None:
    model = small.net()
    optimizers = matrices_and_rest(model, "sgd")
    replica = thinwire.attach(model, optimizers, thinwire.AllReduce())
    x, y = small.batch(0, 0)
    F.cross_entropy(replica(x), y).backward()
    optimizers[1].step()
    with pytest.raises(ThinwireError, match=r"AdamW \(optimizer 1\) stepped twice before SGD \(optimizer 0\) did"):
        optimizers[1].step()


def test_a_scaler_steps_several_optimizers() -> None:
    model = small.net()
    optimizers = matrices_and_rest(model, "sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    replica = thinwire.attach(model, optimizers, small.ab(), scaler=scaler)
    for number in range(small.STEPS):
        x, y = small.batch(0, number)
        loss = F.cross_entropy(replica(x), y)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert replica.step == small.STEPS
    F.cross_entropy(replica(x), y).backward()
    with pytest.raises(ThinwireError, match=r"AdamW \(optimizer 1\) stepped by itself, but a scaler was given"):
        optimizers[1].step()


# Optimizers that were not attached.


class Plain:
    """An optimizer that is none of torch's."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            p.sub_(0.01 * p.grad if p.grad is not None else 0.0)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


class Silent(Plain):
    """One that nothing at all can notice, but the values."""

    def step(self) -> None:
        for p in self.parameters:
            p.data.sub_(0.01 * p.grad)


def error_of(work: Callable[..., Any], *args: Any) -> str:
    try:
        work(*args)
    except ThinwireError as error:
        return str(error)
    return ""


def merge(replica: Any) -> None:
    with replica.merged():
        pass


def step_by_others(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, config in METHODS.items():
        model = small.net()
        replica = thinwire.attach(model, small.sgd(model), config())
        rebuilt = small.sgd(model)
        found[name, "rebuilt"] = error_of(small.step, replica, rebuilt, rank, 0)
        found[name, "untouched"] = small.bits(*model.parameters()) == small.bits(*small.net().parameters())
        replica.detach()
        small.step(model, rebuilt, rank, 0)  # now it may

        for kind in (Plain, Silent):
            model = small.net()
            replica = thinwire.attach(model, small.sgd(model), config())
            other = kind(model.parameters())
            for number in range(3):  # the first dozen batches may be perturbations on purpose
                small.step(replica, other, rank, number)
            found[name, kind.__name__, "merged"] = error_of(merge, replica)
            if kind is Plain:
                errors = (error_of(small.step, replica, other, rank, number) for number in range(3, 30))
                found[name, "noticed"] = next(filter(None, errors), "")
            found[name, kind.__name__, "finish"] = error_of(replica.finish)
    return found


@pytest.mark.slow
def test_an_optimizer_that_was_not_attached_is_an_error_that_says_why() -> None:
    here, there = gang.run(step_by_others, 2)
    for name in METHODS:
        for found in (here, there):
            assert "SGD steps parameters of a replica, but was not given to attach()" in found[name, "rebuilt"]
            assert found[name, "untouched"]
            assert "without a step of the attached optimizer (SGD)" in found[name, "noticed"]
        for kind, call in itertools.product(("Plain", "Silent"), ("merged", "finish")):
            # Where the world averages every gradient workers stay alike, whoever steps.
            said = here[name, kind, call]
            assert said == there[name, kind, call]
            assert bool(said) == (name in ("localsgd", "diloco", "daso")), (name, kind, call, said)
            assert not said or "no step of the attached optimizer was seen" in said


def test_batches_without_steps_are_fine_where_nothing_changes() -> None:
    """Accumulation without `no_sync`, and sharpness-aware steps, which perturb parameters on purpose."""
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    for number in range(50):
        x, y = small.batch(0, number)
        F.cross_entropy(replica(x), y).backward()
    optimizer.step()
    for number in range(50):
        x, y = small.batch(0, number)
        F.cross_entropy(replica(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-3)
        F.cross_entropy(replica(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1e-3)
        optimizer.step()
    assert replica.step == 51


def test_another_models_optimizer_and_a_replica_that_is_gone_disturb_nobody() -> None:
    model, other = small.mlp(), small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    small.step(other, small.sgd(other), 0, 0)
    del replica, optimizer
    thinwire.attach(model, small.sgd(model), thinwire.AllReduce()).detach()
    small.step(model, small.sgd(model), 0, 0)


# Wrappers.


class Wrapper(Optimizer):
    """As Accelerate's: an Optimizer by name that only calls another and never initialised its base."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Lookahead(Optimizer):
    """One that steps another inside of its own step."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


@pytest.mark.parametrize("wrap", [Wrapper, lambda o: Wrapper(Wrapper(o)), Lookahead])
def test_a_wrapped_optimizer_is_followed(wrap: Callable[[Optimizer], Any]) -> None:
    model = small.mlp()
    optimizer = wrap(small.sgd(model))
    replica = thinwire.attach(model, optimizer, small.ab())
    for number in range(small.STEPS):
        small.step(replica, optimizer, 0, number)
    assert replica.step == small.STEPS


def test_what_is_no_optimizer_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"Plain is not a torch.optim.Optimizer.*give the torch optimizer"):
        attached(lambda model: Plain(model.parameters()))


def test_replicas_may_be_collected_in_the_middle_of_a_step() -> None:
    """torch walks through the hooks of all optimizers, and garbage is collected whenever it likes."""
    model, other = small.mlp(), small.mlp()
    optimizer = small.sgd(other)
    gc.disable()
    collects = register_optimizer_step_pre_hook(lambda *_: [gc.collect(), None][1])
    try:
        thinwire.attach(model, small.sgd(model), thinwire.AllReduce())
        del model
        small.step(other, optimizer, 0, 0)
    finally:
        collects.remove()
        gc.enable()
