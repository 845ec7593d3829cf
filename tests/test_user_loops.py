"""The loops that users really have, on real workers."""

import contextlib
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gang
import small
import thinwire
from patience import LIMIT_S
from selection import first_of

WORLD_PHASES = ("warmup", "rebound", "final", "train")


def all_equal(values: list[Any]) -> bool:
    return all(value == values[0] for value in values)


# Gradient accumulation.


def accumulate(model: Any, optimizer: Any, rank: int, number: int, *, quiet: bool, micro: int = 3) -> None:
    """One step over `micro` batches; `quiet` averages gradients at the last of them only."""
    for part in range(micro):
        x, y = small.batch(rank, micro * number + part)
        hush = quiet and part < micro - 1
        with model.no_sync() if hush else contextlib.nullcontext():
            (F.cross_entropy(model(x), y) / micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulate_like_ddp(rank: int) -> list[bool]:
    small.strict()
    found = []
    for quiet in (False, True):
        model = small.net()
        plain = DistributedDataParallel(copy.deepcopy(model))
        ours, theirs = small.sgd(model), small.sgd(plain)
        replica = thinwire.attach(model, ours, thinwire.AllReduce())
        for number in range(5):
            accumulate(plain, theirs, rank, number, quiet=quiet)
            accumulate(replica, ours, rank, number, quiet=quiet)
            found.append(small.bits(*plain.parameters()) == small.bits(*replica.parameters()))
        found.append(small.bits(*plain.parameters()) != small.bits(*small.net().parameters()))
    return found


@pytest.mark.slow
def test_accumulation_with_allreduce_is_ddps_bit_for_bit() -> None:
    assert all(all(found) for found in gang.run(accumulate_like_ddp, 3))


def accumulate_with_ab(rank: int, group_size: int) -> dict[str, Any]:
    """The same images as one batch, as micro-batches, and as micro-batches that are averaged once."""
    small.strict()
    results: dict[str, Any] = {"moved": []}
    for way in ("whole", "averaged", "quiet"):
        model = small.mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = thinwire.attach(model, optimizer, small.ab(group_size=group_size))
        for number in range(small.STEPS):
            before = replica.phase, replica.ranks()
            take_micro_batches(replica, optimizer, rank, number, way)
            if (replica.phase, replica.ranks()) != before:
                results["moved"].append((way, "inside a step"))
            optimizer.step()
        results[way] = small.clone(replica.module)
    return results


def take_micro_batches(replica: Any, optimizer: Any, rank: int, number: int, way: str) -> None:
    optimizer.zero_grad()
    halves = [small.batch(rank, 2 * number + part) for part in range(2)]
    if way == "whole":
        halves = [tuple(torch.cat(both) for both in zip(*halves, strict=True))]  # type: ignore[misc]
    for part, (x, y) in enumerate(halves):
        hush = way == "quiet" and part == 0
        with replica.no_sync() if hush else contextlib.nullcontext():
            (F.cross_entropy(replica(x), y) / len(halves)).backward()


@pytest.mark.parametrize(("workers", "group_size"), first_of([(3, 2), (2, 1)]))
def test_accumulation_with_ab_drops_no_gradient(workers: int, group_size: int) -> None:
    """Ragged groups too: there one group has no DDP to be silenced."""
    for found in gang.run(accumulate_with_ab, workers, group_size):
        assert found["moved"] == []
        for way in ("averaged", "quiet"):
            for name, value in found["whole"].items():
                torch.testing.assert_close(found[way][name], value, rtol=1e-4, atol=1e-5)


# Mixed precision.


def bf16_loop(rank: int) -> dict[str, Any]:
    small.strict()
    result: dict[str, Any] = {"bits": []}
    for inside in (False, True):
        model = small.net()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, small.ab())
        for number in range(small.STEPS):
            x, y = small.batch(rank, number)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = replica(x)
                loss = F.cross_entropy(logits, y)
            loss.backward()
            # Some loops take the step inside autocast: what changes shape there must not be rounded.
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                optimizer.step()
        result["dtype"] = logits.dtype
        result["bits"].append(small.model_bits(replica.module))
        result["parameters"] = {p.dtype for p in replica.parameters()}
    return result


@pytest.mark.slow
def test_autocast() -> None:
    found = gang.run(bf16_loop, 2)
    assert all_equal([bits for worker in found for bits in worker["bits"]])
    assert all(worker["dtype"] == torch.bfloat16 for worker in found)
    assert all(worker["parameters"] == {torch.float32} for worker in found)


BROKEN = {4: 1, 12: 1, 14: 0, 16: 0, 19: 1}
"""Step and rank of batches that overflow: in a group phase, at its last step, and in full-rank phases."""


def scaled_step(replica: Any, optimizer: Any, scaler: Any, rank: int, number: int, broken: dict[int, int]) -> None:
    x, y = small.batch(rank, number)
    loss = F.cross_entropy(replica(x), y)
    if broken.get(number) == rank:
        loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def scaled_loop(rank: int) -> list[dict[str, Any]]:
    small.strict()
    model = small.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    replica = thinwire.attach(model, optimizer, small.ab(moments="average"), scaler=scaler)
    seen = []
    for number in range(small.STEPS):
        scaled_step(replica, optimizer, scaler, rank, number, BROKEN)
        state = scaler.state_dict()
        seen.append(
            {
                "phase": replica.phase,
                "step": replica.step,
                "model": small.model_bits(replica.module),
                "optimizer": small.optimizer_bits(optimizer),
                "scale": (state["scale"], state["_growth_tracker"]),
            }
        )
    return seen


def test_a_step_skipped_on_one_worker_leaves_all_workers_alike() -> None:
    found = gang.run(scaled_loop, 2)
    for number, (here, there) in enumerate(zip(*found, strict=True)):
        assert here["step"] == there["step"] == number + 1
        if here["phase"] in WORLD_PHASES:
            assert here == there, f"workers differ after step {number}"
    apart = [number for number, (here, there) in enumerate(zip(*found, strict=True)) if here["scale"] != there["scale"]]
    # The step was skipped by one worker alone, or this test shows nothing.
    assert 4 in apart
    final = found[0][-1]["scale"][0]
    assert 0 < final < float("inf")


def unseen_scaler(rank: int) -> str:
    small.strict()
    model = small.net()
    optimizer = small.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    replica = thinwire.attach(model, optimizer, small.ab())
    with pytest.raises(thinwire.DisagreementError) as caught:
        for number in range(small.STEPS):
            scaled_step(replica, optimizer, scaler, rank, number, {4: 1})
    return str(caught.value)


def test_a_scaler_nobody_told_of_is_an_error_that_says_so() -> None:
    for message in gang.run(unseen_scaler, 3):
        assert "rank 1 ran 8 batches in 7 steps" in message
        assert "scaler=scaler" in message


# Clipping, parameter groups, schedulers, closures.


def clipped_loop(rank: int) -> list[tuple[str, float, float]]:
    small.strict()
    model = small.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = thinwire.attach(model, optimizer, small.ab(lr_rebound=0))
    moved = []
    for number in range(small.STEPS):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        F.cross_entropy(replica(x), y).backward()
        norm = float(nn.utils.clip_grad_norm_(replica.parameters(), 1e-3))
        before, phase = [p.detach().clone() for p in replica.parameters()], replica.phase
        optimizer.step()
        if replica.phase == phase:
            change = [(p.detach() - old).norm() for p, old in zip(replica.parameters(), before, strict=True)]
            moved.append((phase, norm, float(torch.stack(change).norm())))
    return moved


def test_gradients_clipped_between_backward_and_step_stay_clipped() -> None:
    for moved in gang.run(clipped_loop, 2):
        assert {phase for phase, _, _ in moved} >= {"warmup", "groups", "rebound"}
        for _, norm, change in moved:
            assert norm > 1e-2
            assert change == pytest.approx(1e-3, rel=0.01)


def two_groups(model: nn.Module) -> tuple[Any, list[dict[str, Any]]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    bare = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "lr": 1e-3, "weight_decay": 0.1},
        {"params": bare, "lr": 1e-2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups), groups


def names_in_groups(model: nn.Module, optimizer: Any) -> list[list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names.get(id(p), "a stranger") for p in group["params"]] for group in optimizer.param_groups]


def grouped_loop(rank: int) -> list[Any]:
    small.strict()
    model = small.net()
    optimizer, _ = two_groups(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    seen = []
    for number in range(small.STEPS):
        small.step(replica, optimizer, rank, number)
        settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        seen.append((replica.phase, settings, names_in_groups(replica.module, optimizer)))
    return seen


def test_parameter_groups_keep_settings_members_and_order() -> None:
    full = ["stem.weight", "conv.weight", "middle.weight", "head.weight"]
    factored = [
        "stem.weight", "conv.weight_a", "conv.weight_b", "middle.weight_a", "middle.weight_b", "head.weight",
    ]  # fmt: skip
    bare = ["stem.bias", "norm.weight", "norm.bias", "conv.bias", "middle.bias", "head.bias"]
    for seen in gang.run(grouped_loop, 2):
        assert {phase for phase, _, _ in seen} == {"warmup", "groups", "rebound", "final"}
        for phase, settings, names in seen:
            assert settings == [(1e-3, 0.1), (1e-2, 0.0)]
            assert names == [factored if phase == "groups" else full, bare]


def test_an_optimizer_with_named_parameters_names_the_factors() -> None:
    model = small.mlp()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    replica = thinwire.attach(model, optimizer, small.ab())
    for _ in small.walk(replica, optimizer, 0):
        group = optimizer.param_groups[0]
        held = {id(p): name for name, p in replica.named_parameters()}
        assert group["param_names"] == [held[id(p)] for p in group["params"]]


SCHEDULES: dict[str, Any] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=small.STEPS + 1),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=small.STEPS),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=5),
}
THIRD, TWO_THIRDS = 1 / 3, 2 / 3
REBOUND = [1, 1, 1, *3 * [THIRD, TWO_THIRDS, 1, 1, THIRD, TWO_THIRDS]]
"""What the learning rate is scaled by: the rebound of a merge is cut short by the next change of shape."""


def scheduled_loop(config: Any, make: Any, rank: int) -> dict[str, list[Any]]:
    model = small.mlp()
    optimizer = small.sgd(model)
    scheduler = make(optimizer)
    replica = thinwire.attach(model, optimizer, config) if config else model
    seen: dict[str, list[Any]] = {"shown": [], "used": []}
    optimizer.register_step_pre_hook(lambda *_: seen["used"].append(optimizer.param_groups[0]["lr"]))
    for number in range(small.STEPS):
        small.step(replica, optimizer, rank, number)
        scheduler.step()
        group = optimizer.param_groups[0]
        seen["shown"].append((scheduler.get_last_lr(), group["lr"], group["momentum"]))
    return seen


def schedule_as_without(rank: int) -> list[tuple[Any, Any]]:
    small.strict()
    return [(scheduled_loop(small.ab(), make, rank), scheduled_loop(None, make, rank)) for make in SCHEDULES.values()]


def test_schedulers_never_notice_the_rebound() -> None:
    for found in gang.run(schedule_as_without, 2):
        for ours, plain in found:
            assert ours["shown"] == plain["shown"]
            wanted = [lr * factor for lr, factor in zip(plain["used"], REBOUND, strict=True)]
            assert ours["used"] == pytest.approx(wanted)


def closure_loop(rank: int, with_closure: bool) -> tuple[str, list[str]]:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    phases = []
    for number in range(small.STEPS):
        x, y = small.batch(rank, number)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(replica(x), y)
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure).item() > 0
        else:
            closure()
            optimizer.step()
        phases.append(replica.phase)
    return small.model_bits(replica.module), phases


def closures_and_zeros(rank: int) -> dict[str, Any]:
    small.strict()
    ways = ("before", "after", "between", "zeros")
    found: dict[str, Any] = {way: zeroing_loop(rank, way) for way in ways}
    return {**found, "closure": closure_loop(rank, True), "plain": closure_loop(rank, False)}


def zeroing_loop(rank: int, way: str) -> str:
    model = small.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = thinwire.attach(model, optimizer, small.ab())
    for number in range(small.STEPS):
        x, y = small.batch(rank, number)
        if way in ("before", "zeros"):
            optimizer.zero_grad(set_to_none=way != "zeros")
        loss = F.cross_entropy(replica(x), y)
        if way == "between":
            replica.zero_grad()
        loss.backward()
        optimizer.step()
        if way == "after":
            optimizer.zero_grad()
    return small.model_bits(replica.module)


@pytest.mark.slow
def test_closures_and_every_way_of_zeroing_train_alike() -> None:
    found = gang.run(closures_and_zeros, 2)
    assert all_equal(found)
    assert found[0]["closure"] == found[0]["plain"]
    assert all_equal([found[0][way] for way in ("before", "after", "between", "zeros")])


def test_a_closure_that_raises_does_not_leave_a_scaled_rate_for_good() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    for _ in small.walk(replica, optimizer, 0, 3):
        pass
    assert replica.phase == "groups"
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for _ in small.walk(replica, optimizer, 0, 3):
        pass
    assert optimizer.param_groups[0]["lr"] == 0.05


# Optimizers.

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def optimizer_loop(rank: int, kind: str, moments: str) -> list[dict[str, Any]]:
    model = small.net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    replica = thinwire.attach(model, optimizer, small.ab(moments=moments, group_size=2))
    seen = []
    for number in small.walk(replica, optimizer, rank):
        seen.append(
            {
                "step": number,
                "phase": replica.phase,
                "model": small.model_bits(replica.module),
                "optimizer": small.optimizer_bits(optimizer),
                # Adagrad notes step 0 of every parameter in its constructor, which is as good as nothing.
                "stateful": sum(
                    float(optimizer.state.get(p, {}).get("step", 1)) > 0 and p in optimizer.state
                    for p in replica.parameters()
                ),
                "finite": all(bool(p.isfinite().all()) for p in replica.parameters()),
            }
        )
    return seen


def every_moment(rank: int, kind: str) -> dict[str, Any]:
    small.strict()
    return {moments: optimizer_loop(rank, kind, moments) for moments in ("reset", "average", "carry")}


def every_optimizer(rank: int) -> dict[str, Any]:
    return {kind: every_moment(rank, kind) for kind in OPTIMIZERS}


@pytest.fixture(scope="module")
def by_optimizer() -> list[dict[str, Any]]:
    return gang.run(every_optimizer, 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_agree_after_every_merge(kind: str, by_optimizer: list[dict[str, Any]]) -> None:
    found = [worker[kind] for worker in by_optimizer]
    for moments in ("reset", "average", "carry"):
        for states in zip(*(worker[moments] for worker in found), strict=True):
            if states[0]["phase"] in WORLD_PHASES:
                assert all_equal(list(states)), f"{kind}, {moments}: workers differ after step {states[0]['step']}"
            assert all(state["finite"] for state in states)
        merged = found[0][moments][6]
        # At the merge itself: nothing is known any more, or of what was not factored, or of everything.
        assert merged["phase"] == "rebound"
        assert merged["stateful"] == {"reset": 0, "average": 8, "carry": 10}[moments]
    last = [found[0][moments][-1]["model"] for moments in ("reset", "average", "carry")]
    assert len(set(last)) == 3
    apart = found[0]["reset"][4], found[2]["reset"][4]
    assert apart[0]["model"] != apart[1]["model"]


@pytest.mark.parametrize(("kind", "remedy"), [("LBFGS", "use SGD or an Adam"), ("SparseAdam", "use Adam")])
def test_optimizers_that_cannot_follow_are_refused_by_name(kind: str, remedy: str) -> None:
    model = small.mlp()
    optimizer = getattr(torch.optim, kind)(list(model.parameters()))
    for config in (small.ab(), thinwire.AllReduce()):
        with pytest.raises(thinwire.ConfigError, match=f"{kind} cannot be attached.*{remedy}"):
            thinwire.attach(model, optimizer, config)


# Evaluation.


def evaluate_alone(rank: int) -> dict[str, Any]:
    """Rank 0 evaluates after every step, the other never; with and without, training must go the same way."""
    small.strict()
    results: dict[str, Any] = {"phases": set(), "sent": 0}
    for evaluates in (False, True):
        model = small.net()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, small.ab())
        for _ in small.walk(replica, optimizer, rank):
            before = replica.traffic.state()["rows"]
            if evaluates and rank == 0:
                results["phases"].add(replica.phase)
                look_at(replica)
            results["sent"] += replica.traffic.state()["rows"] != before
        results[evaluates] = small.model_bits(replica.module)
    return results


def look_at(replica: Any) -> None:
    x, _ = small.batch(7, 7)
    phase = replica.phase
    replica.eval()
    with torch.no_grad():
        first = replica(x)
    second = replica(x)  # eval() alone must do as well
    replica.train()
    replica.module.norm.eval()  # its statistics would move
    with torch.no_grad():
        replica(x)  # and so must no_grad() alone
    replica.train()
    assert replica.phase == phase
    torch.testing.assert_close(first, second)


def test_rank_0_may_evaluate_alone_in_every_phase() -> None:
    found = gang.run(evaluate_alone, 2, patience=20)
    assert found[0]["phases"] == {"warmup", "groups", "rebound", "final"}
    assert [worker["sent"] for worker in found] == [0, 0]
    assert all_equal([worker[way] for worker in found for way in (False, True)])


def lend(rank: int, wire: str) -> dict[str, Any]:
    small.strict()
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab(wire=wire))
    seen: dict[str, Any] = {"own": [], "lent": [], "back": [], "evaluate": [], "other": []}
    for number in small.walk(replica, optimizer, rank):
        if number not in (1, 4):
            continue
        seen["own"].append(small.clone(replica.module))
        other = dict(replica.traffic.by_purpose)
        other.pop("evaluate", None)
        with replica.merged() as lent:
            seen["lent"].append(small.clone(lent.module))
        seen["back"].append(small.clone(replica.module))
        after = dict(replica.traffic.by_purpose)
        seen["evaluate"].append(after.pop("evaluate", {"slow_bytes": 0})["slow_bytes"])
        seen["other"].append(after == other)
    seen["final"] = small.model_bits(replica.module)
    return seen


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_merged_lends_the_mean_and_puts_the_groups_own_back(wire: str) -> None:
    here, there = gang.run(lend, 2, wire)
    for i, in_groups in enumerate((False, True)):
        assert small.same(here["own"][i], there["own"][i]) != in_groups
        assert small.same(here["lent"][i], there["lent"][i])
        for worker in (here, there):
            assert small.same(worker["own"][i], worker["back"][i])
            assert worker["other"][i]
            assert (worker["evaluate"][i] > 1000) == in_groups  # together only checksums are compared
    near = {"rtol": 1e-5, "atol": 1e-6} if wire == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    for name, value in here["lent"][1].items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (here["own"][1][name] + there["own"][1][name]) / 2, **near)
    assert here["final"] == there["final"]


def save_scales(rank: int, folder: str) -> list[Any]:
    small.strict()
    seen = []
    for resumed in (False, True):
        model = small.net()
        optimizer = small.sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        replica = thinwire.attach(model, optimizer, small.ab(), scaler=scaler)
        if resumed:
            replica.load(folder)
        for number in range(replica.step, 6):
            scaled_step(replica, optimizer, scaler, rank, number, {4: 1})
            if number == 4 and not resumed:
                replica.save(folder)
        seen.append((scaler.state_dict(), small.model_bits(replica.module)))
    dist.barrier()
    return seen


def test_a_save_in_a_group_phase_keeps_every_workers_scale(tmp_path: Any) -> None:
    found = gang.run(save_scales, 2, str(tmp_path / "save"))
    for straight, resumed in found:
        assert resumed == straight
    assert [worker[0][0]["scale"] for worker in found] == [1024.0, 512.0]


@pytest.mark.slow
def test_a_script_that_never_leaves_has_left_when_the_interpreter_ends() -> None:
    """A thread of a process group that wants Python after its end would abort the process, now and then."""
    ways = ["finish", "unfinished", "own group"]
    script = Path(__file__).with_name("leaves_at_exit.py")
    done = subprocess.run([sys.executable, script, *ways], capture_output=True, text=True, timeout=LIMIT_S)
    assert sorted(done.stdout.splitlines()) == sorted(
        line for how in ways for line in [f"{how}: [] False", f"{how} ended with 0"] * 2
    ), done.stderr
