"""Loops that strangers write, by every method: workers agree, or hear from Thinwire why they cannot go on."""

import contextlib
import copy
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import many
import thinwire
from covering import cases, gangs
from every_method import STEPS, WAYS, engine
from test_masters import MasterSGD
from test_sweep import EXPECTED, digest, look
from zoo import WIDE, mlp

pytestmark = pytest.mark.slow

Trace = list[Any]
LOOPS: dict[str, Callable[[int, str], Trace]] = {}


def loop(function: Callable[[int, str], Trace]) -> Callable[[int, str], Trace]:
    """A loop that returns a look at each step, and digests that must be the same on all workers."""
    LOOPS[function.__name__] = function
    return function


def net(seed: int = 0) -> nn.Module:
    """With BatchNorm, so that there is something to disagree on beside parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), *mlp())


def batch(rank: int, step: int, width: int = WIDE) -> Tensor:
    """No other worker and no other step has it."""
    return torch.randn(6, width, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def attach(way: str, seed: int = 0, optimizer: Any = None, **options: Any) -> tuple[Any, Optimizer]:
    model = net(seed)
    made = (optimizer or functools.partial(torch.optim.AdamW, lr=1e-3))(model.parameters())
    return thinwire.attach(model, made, WAYS[way].config(), **options), made


def walk(replica: Any, optimizer: Optimizer, rank: int, start: int = 0, end: int = STEPS) -> Iterator[int]:
    """Plain steps, and a stop after each."""
    for step in range(start, end):
        loss = loss_of(replica(batch(rank, step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


def ended(replica: Any, seen: Trace) -> Trace:
    return [*seen, digest([*(model := replica.finish()).parameters(), *model.buffers()])]


# Several models, several optimizers.


@loop
def adversaries(rank: int, way: str) -> Trace:
    """A GAN: the generator's step sends gradients through the discriminator, which drops them."""
    (g, g_optimizer), seen = attach(way), []
    critic = mlp(5)
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    d = thinwire.attach(critic, d_optimizer, WAYS[way].config())
    for step in range(STEPS):
        fake = g(batch(rank, step))
        loss = loss_of(d(batch(rank, step, 5))) + d(fake.detach()).square().mean()
        d_optimizer.zero_grad()
        loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        loss_of(d(fake)).backward()
        g_optimizer.step()
        seen += [look(g, [g_optimizer]), look(d, [d_optimizer])]
    return ended(d, ended(g, seen))


def pair(way: str, seed: int) -> tuple[Any, Any, Optimizer]:
    """Two models under one optimizer."""
    torch.manual_seed(seed)
    first, second = mlp(), mlp(5)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-3)
    replicas = [thinwire.attach(model, optimizer, WAYS[way].config()) for model in (first, second)]
    return replicas[0], replicas[1], optimizer


def walk_pair(a: Any, b: Any, optimizer: Optimizer, rank: int, start: int, end: int) -> None:
    for step in range(start, end):
        optimizer.zero_grad()
        loss_of(b(a(batch(rank, step)))).backward()
        optimizer.step()


@loop
def one_optimizer_for_two_models(rank: int, way: str) -> Trace:
    a, b, optimizer = pair(way, 0)
    walk_pair(a, b, optimizer, rank, 0, STEPS)
    return ended(b, ended(a, []))


@loop
def resuming_two_models_of_one_optimizer(rank: int, way: str) -> Trace:
    a, b, optimizer = pair(way, 0)
    walk_pair(a, b, optimizer, rank, 0, 5)
    a.save("a"), b.save("b")
    walk_pair(a, b, optimizer, rank, 5, 9)
    unbroken = digest([*a.parameters(), *b.parameters()])
    a, b, optimizer = pair(way, 7)
    a.load("a"), b.load("b")
    walk_pair(a, b, optimizer, rank, 5, 9)
    assert digest([*a.parameters(), *b.parameters()]) == unbroken, "resumed differs from never stopped"
    return []


@loop
def another_optimizer_beside(rank: int, way: str) -> Trace:
    """One optimizer is attached, the other trains the biases after it."""
    model = net()
    kinds = [[p for p in model.parameters() if (p.dim() > 1) == weights] for weights in (True, False)]
    first, second = (torch.optim.AdamW(parameters, lr=1e-3) for parameters in kinds)
    replica = thinwire.attach(model, first, WAYS[way].config())
    for _ in walk(replica, first, rank):
        second.step()
        second.zero_grad()
    return ended(replica, [])


# Steps of another kind.


@loop
def a_gradient_penalty(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    for step in range(STEPS):
        x = batch(rank, step).requires_grad_()
        output = replica(x)
        slope = torch.autograd.grad(output.sum(), x, create_graph=True)[0]
        optimizer.zero_grad()
        (loss_of(output) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def sharpness_aware(rank: int, way: str) -> Trace:
    """Two backward passes a step, the second from weights that were moved for it."""
    (replica, optimizer), seen = attach(way, optimizer=functools.partial(torch.optim.SGD, lr=0.01)), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(replica(batch(rank, step))).backward()
        moved = [(p, 0.05 * p.grad / (p.grad.norm() + 1e-6)) for p in replica.parameters() if p.grad is not None]
        with torch.no_grad():
            [p.add_(by) for p, by in moved]
        optimizer.zero_grad()
        loss_of(replica(batch(rank, step))).backward()
        with torch.no_grad():
            [p.sub_(by) for p, by in moved]
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def batches_that_fail_or_are_skipped(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    for step in range(STEPS):
        with contextlib.suppress(ZeroDivisionError):
            output = replica(batch(rank, step))
            if step == 5:
                raise ZeroDivisionError
            optimizer.zero_grad()
            loss_of(output).backward()
            if step != 8:
                optimizer.step()
                seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def scaled_and_accumulated(rank: int, way: str) -> Trace:
    """With overflows on one worker, with and without no_sync, clipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    (replica, optimizer), seen = attach(way, scaler=scaler), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            large = float("inf") if step in (6, 13) and rank == 1 and part else 1.0
            with replica.no_sync() if part == 0 and step % 2 else contextlib.nullcontext():
                scaler.scale(large * loss_of(replica(batch(rank, 2 * step + part)))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def a_scaler_that_is_not_used(rank: int, way: str) -> Trace:
    replica, optimizer = attach(way, scaler=torch.amp.GradScaler("cpu"))
    seen = [look(replica, [optimizer]) for _ in walk(replica, optimizer, rank)]
    assert replica.step == STEPS, f"{replica.step} steps were counted of {STEPS}"
    return ended(replica, seen)


@loop
def every_batch_in_no_sync(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with replica.no_sync():
            loss_of(replica(batch(rank, step))).backward()
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


# Looking at the model, and changing it.


@loop
def looks_in_every_phase(rank: int, way: str) -> Trace:
    """The merged model at every step, a copy of it, and rank 0 that evaluates alone."""
    (replica, optimizer), seen = attach(way), []
    for _ in walk(replica, optimizer, rank):
        with contextlib.suppress(ZeroDivisionError), replica.merged():
            seen.append(digest(copy.deepcopy(replica.module).parameters()))
            raise ZeroDivisionError
        if rank == 0:
            with torch.inference_mode():
                replica.eval()(batch(0, 0))
            replica.train()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def statistics_taken_again_at_the_end(rank: int, way: str) -> Trace:
    """BatchNorm's, on each worker's own batches, as `update_bn` does; here right after an average."""
    replica, optimizer = attach(way)
    for _ in walk(replica, optimizer, rank, end=18):
        pass
    with torch.no_grad():
        replica(batch(rank, 18))
    return ended(replica, [])


@loop
def inside_another_module(rank: int, way: str) -> Trace:
    replica, optimizer = attach(way)
    outer = nn.ModuleDict({"net": replica})
    for _ in walk(replica, optimizer, rank, end=5):
        outer.load_state_dict(outer.state_dict())
    return []


@loop
def a_hook_on_a_weight(rank: int, way: str) -> Trace:
    """A mask, as for pruning or freezing rows."""
    replica, optimizer = attach(way, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    weight = replica.module[4].weight
    weight.register_hook(torch.zeros_like)
    before = weight.detach().clone()
    for _ in walk(replica, optimizer, rank):
        pass
    with replica.merged():
        # Codes have no zero: what stands still trembles, by what error feedback takes back.
        moved = float((replica.module[4].weight.detach() - before).norm() / before.norm())
    assert moved < 5e-3, f"a weight whose gradients are zeroed by a hook moved by {moved:.2f} of its norm"
    return []


@loop
def a_weight_that_is_clamped(rank: int, way: str) -> Trace:
    replica, optimizer = attach(way, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    for _ in walk(replica, optimizer, rank):
        with torch.no_grad():
            replica.module[4].weight.clamp_(-0.05, 0.05)
        largest = float(replica.module[4].weight.detach().abs().max())
        assert largest < 0.051, f"clamped at 0.05, it is {largest:.3f}"
    return []


@loop
def another_dtype_on_the_way(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way, optimizer=functools.partial(torch.optim.SGD, lr=0.01)), []
    seen += [look(replica, [optimizer]) for _ in walk(replica, optimizer, rank, end=5)]
    replica.double()
    for step in range(5, STEPS):
        optimizer.zero_grad()
        loss_of(replica(batch(rank, step).double())).backward()
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def fp64_by_default(rank: int, way: str) -> Trace:
    torch.set_default_dtype(torch.float64)
    try:
        replica, optimizer = attach(way)
        return ended(replica, [look(replica, [optimizer]) for _ in walk(replica, optimizer, rank)])
    finally:
        torch.set_default_dtype(torch.float32)


@loop
def a_parameter_group_added_later(rank: int, way: str) -> Trace:
    model = net()
    optimizer = torch.optim.AdamW(model[2:].parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, WAYS[way].config())
    seen = [look(replica, [optimizer]) for _ in walk(replica, optimizer, rank, end=2)]
    optimizer.add_param_group({"params": list(model[:2].parameters())})
    seen += [look(replica, [optimizer]) for _ in walk(replica, optimizer, rank, 2)]
    return ended(replica, seen)


@loop
def attached_again_when_finished(rank: int, way: str) -> Trace:
    replica, optimizer = attach(way)
    for _ in walk(replica, optimizer, rank, end=9):
        pass
    model = replica.finish()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fields = {"keep_first": False, "keep_last": False} if way.startswith("ab") or way == "oialr" else {}
    again = thinwire.attach(model, optimizer, WAYS[way].config(**fields))
    return ended(again, [look(again, [optimizer]) for _ in walk(again, optimizer, rank)])


@loop
def rolled_back_to_the_best(rank: int, way: str) -> Trace:
    """Model and optimizer, by their state dicts; where shapes have changed since, torch's own words would not help."""
    (replica, optimizer), seen, best = attach(way), [], {}
    for step in walk(replica, optimizer, rank):
        if step == 9:
            with replica.merged():
                best = copy.deepcopy(replica.state_dict())
        if step == 10:
            replica.load_state_dict(best)
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def frozen_and_unfrozen(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    for step in walk(replica, optimizer, rank):
        replica.module[0].requires_grad_(not 4 <= step < 9)
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def a_layer_added_late(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    for step in walk(replica, optimizer, rank):
        if step == 6:
            replica.module.append(nn.Linear(5, 5))
            optimizer.add_param_group({"params": list(replica.module[-1].parameters())})
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def rates_by_each_workers_own_loss(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for step in walk(replica, optimizer, rank):
        scheduler.step(float(step if rank else -step))
        seen.append(look(replica, [optimizer]) if replica.in_sync and step < 2 else "")
    return ended(replica, seen)


@loop
def master_weights(rank: int, way: str) -> Trace:
    """An optimizer that trains copies, on a model in bf16."""
    model = net().bfloat16()
    optimizer = MasterSGD(model.parameters(), 0.01)
    replica, seen = thinwire.attach(model, optimizer, WAYS[way].config()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(replica(batch(rank, step).bfloat16()).float()).backward()
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def clipped_by_a_kept_list(rank: int, way: str) -> Trace:
    (replica, optimizer), seen = attach(way), []
    kept = list(replica.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(replica(batch(rank, step))).backward()
        nn.utils.clip_grad_norm_(kept, 0.1)
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def diffusion_with_a_moving_average(rank: int, way: str) -> Trace:
    """Noise of random strength is predicted; samples come from the average."""
    (replica, optimizer), seen = attach(way), []
    average = thinwire.EMA(replica, 0.9)
    for step in range(STEPS):
        x, noise = batch(rank, step), batch(rank, 100 + step)
        strength = torch.rand(6, 1, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss_of(replica((1 - strength) * x + strength * noise)).backward()
        optimizer.step()
        average.update_parameters(replica)
        seen.append(look(replica, [optimizer]))
    with torch.no_grad():
        assert torch.isfinite(average(batch(0, 0))).all()
    return ended(replica, seen)


@loop
def truncated_through_time(rank: int, way: str) -> Trace:
    """A recurrent state goes from batch to batch, cut off from what made it."""
    (replica, optimizer), seen = attach(way), []
    state = torch.zeros(6, 5)
    for step in range(STEPS):
        state = replica(torch.cat([batch(rank, step)[:, :-5], state.detach()], 1)).tanh()
        optimizer.zero_grad()
        loss_of(state).backward()
        optimizer.step()
        seen.append(look(replica, [optimizer]))
    return ended(replica, seen)


@loop
def two_runs_in_one_process(rank: int, way: str) -> Trace:
    """One after the other, the second from another start; the first one's end is not its."""
    seen: Trace = []
    for seed in range(2):
        replica, optimizer = attach(way, seed)
        seen += [look(replica, [optimizer]) for _ in walk(replica, optimizer, rank)]
        seen.append(digest(replica.finish().parameters()))
    assert seen[STEPS] != seen[-1]
    return seen


def go_through(rank: int, name: str, way: str, folder: str) -> Trace | str:
    """What the loop returned, or the error by which Thinwire refused it; in a folder of its own."""
    home = Path(folder) / f"{name}-{way}"
    home.mkdir(exist_ok=True)
    os.chdir(home)
    try:
        return LOOPS[name](rank, way)
    except thinwire.ThinwireError as error:
        return type(error).__name__


KNOWN: dict[tuple[str, str], str] = {}
"""Loops and methods that are broken, and how."""


def known(name: str, why: str, *ways: str) -> None:
    KNOWN.update({(name, way): why for way in ways or WAYS})


AB = ("ab", "ab split", "ab both", "ab-paper", "ab-paper carry", "ab-paper average")
known("a_weight_that_is_clamped", "what is written into a factored layer's weight is lost", *AB, "oialr")


REFUSED = {
    "another_optimizer_beside": "ConfigError",
    "a_scaler_that_is_not_used": "ThinwireError",
    "every_batch_in_no_sync": "ThinwireError",
    "another_dtype_on_the_way": "ConfigError",
    "a_parameter_group_added_later": "ConfigError",
    "frozen_and_unfrozen": "ConfigError",
    "a_layer_added_late": "ConfigError",
    "rates_by_each_workers_own_loss": "DisagreementError",
}
"""Loops that every method refuses, and by which error."""

REFUSED_BY = {
    ("rolled_back_to_the_best", "ab"): "ThinwireError",  # shapes have changed since
    ("master_weights", "ab"): "ConfigError",
    ("master_weights", "cuts weights"): "ConfigError",
}
"""Loops that methods on one engine refuse. All others must go through."""


MATRIX = [{"loop": name, "way": way, "engine": engine(way)} for name in LOOPS for way in WAYS]
# Every loop meets every engine, by one method or another.
KEYS = [(str(case["loop"]), str(case["way"])) for case in cases(MATRIX, [("loop", "way")])]
GANGS = gangs(KEYS, lambda key: 2)


@functools.cache
def gone_through(keys: tuple[tuple[str, str], ...]) -> list[dict[str, many.Outcome]]:
    """Loops by methods, in one gang."""
    with tempfile.TemporaryDirectory() as folder:
        return many.run(go_through, 2, {f"{key}": (*key, folder) for key in keys}, Path(folder))


def params() -> list[Any]:
    """What is due, with a mark where it is known to fail."""
    marks = {key: pytest.mark.xfail(strict=True, reason=why) for key, why in KNOWN.items()}
    return [pytest.param(*key, id="-".join(key), marks=marks.get(key, ())) for key in KEYS]


@pytest.mark.parametrize(("name", "way"), params())
def test_workers_agree_or_hear_why_not(name: str, way: str) -> None:
    key = (name, way)
    found = many.values([worker[f"{key}"] for worker in gone_through(GANGS[key])], EXPECTED)
    expected = REFUSED.get(name) or REFUSED_BY.get((name, engine(way)))
    said = [seen if isinstance(seen, str) else None for seen in found]
    assert said == [expected] * 2, f"expected {expected or 'a loop that goes through'}, found {said}"
    for number, states in enumerate(zip(*found, strict=True) if expected is None else ()):
        if isinstance(states[0], str) or states[0]["spans world"]:
            assert states[0] == states[1], f"workers differ at look {number} of {len(found[0])}: {states}"
