"""Second moments that stay as the warm-up left them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam

import gang
import small
import thinwire
from thinwire import ConfigError
from thinwire.comm.topology import arrange
from thinwire.exchange.parts import MethodContext
from thinwire.exchange.second_moment import FrozenSecondMoment
from thinwire.factor.optimizers import Optimizers
from thinwire.plan import ranks as predicted
from thinwire.plan.simulate import simulate
from thinwire.plan.workload import Workload

WAYS: dict[str, Any] = {
    "onebit": thinwire.OneBit(warmup=4, freeze_second_moment=True, group_size=1),
    "powersgd": thinwire.PowerSGD(rank=2, warmup=4, warmup_wire="bf16", freeze_second_moment=True, group_size=1),
}


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_updates_divide_by_what_was_frozen(kind: type, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, 7))
    decay = 0.1 if kind is AdamW else 0.0
    optimizer = kind([p], lr=0.01, betas=(0.9, 0.95), weight_decay=decay, **how)
    context = MethodContext(nn.Identity(), Optimizers(optimizer), None)  # type: ignore[arg-type]
    phase = {"frozen": False}
    frozen = FrozenSecondMoment(context, True, lambda: phase["frozen"])
    optimizer.register_step_pre_hook(lambda o, *_: context.before_update[0](o))
    optimizer.register_step_post_hook(lambda o, *_: context.after_update[0](o))
    state = optimizer.state[p]
    name = "max_exp_avg_sq" if "amsgrad" in how else "exp_avg_sq"
    for grad in torch.randn(6, 5, 7):
        p.grad = grad
        optimizer.step()
    second, m, value = state[name].clone() / (1 - 0.95**6), state["exp_avg"].clone(), p.detach().clone()
    frozen.freeze()
    phase["frozen"] = True
    for number, grad in enumerate(torch.randn(9, 5, 7) * 3, start=7):
        p.grad = grad
        optimizer.step()
        m = 0.9 * m + 0.1 * grad
        first = m / (1 - 0.9**number)
        value = value * (1 - 0.01 * decay) - 0.01 * first / (torch.maximum(second, first**2).sqrt() + 1e-8)
        assert torch.allclose(state[name], second)
    assert torch.allclose(p, value, atol=2e-6)


def train(replica: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for number in steps:
        x, y = small.batch(rank, number)
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state["exp_avg_sq"].clone() for state in optimizer.state.values()]


def stopped_and_not(rank: int, folder: Path) -> dict[str, Any]:
    """Two runs of 12 steps, one saved and loaded again after 8; and second moments at 5 and 12."""
    found = {}
    for name, config in WAYS.items():
        ends, seen = [], []
        for stop in (12, 8):
            model = small.mlp()
            optimizer = AdamW(model.parameters(), 3e-3)
            replica = thinwire.attach(model, optimizer, config)
            train(replica, optimizer, rank, range(5))
            seen.append(moments(optimizer))
            train(replica, optimizer, rank, range(5, stop))
            if stop < 12:
                replica.save(folder / name)
                replica.detach()
                model = small.mlp(1)
                optimizer = AdamW(model.parameters(), 3e-3)
                replica = thinwire.attach(model, optimizer, config)
                replica.load(folder / name)
                train(replica, optimizer, rank, range(stop, 12))
            seen.append(moments(optimizer))
            replica.finish()
            ends.append(small.model_bits(model))
        found[name] = ends, all(torch.equal(a, b) for now in seen[1:] for a, b in zip(seen[0], now, strict=True))
    return found


def test_they_stay_through_a_save_and_workers_agree(tmp_path: Path) -> None:
    first, second = gang.run(stopped_and_not, 2, tmp_path)
    for name in WAYS:
        (through, stopped), stayed = first[name]
        assert through == stopped == second[name][0][0], name
        assert stayed, name


def test_what_the_warm_up_never_showed_moves_by_the_rate_at_most() -> None:
    p = nn.Parameter(torch.zeros(3, 4))
    optimizer = Adam([p], lr=0.01)
    context = MethodContext(nn.Identity(), Optimizers(optimizer), None)  # type: ignore[arg-type]
    frozen = FrozenSecondMoment(context, True, lambda: True)
    p.grad = torch.zeros(3, 4)
    optimizer.step()
    frozen.freeze()
    for _ in range(5):
        before = p.detach().clone()
        p.grad = torch.randn(3, 4)
        context.before_update[0](optimizer)
        optimizer.step()
        context.after_update[0](optimizer)
        assert float((p.detach() - before).abs().max()) <= 0.01 * 1.001


def test_alone_nothing_is_frozen() -> None:
    ends = []
    for config in (None, thinwire.OneBit(warmup=2, freeze_second_moment=True)):
        model = small.mlp()
        optimizer = AdamW(model.parameters(), 3e-3)
        train(model if config is None else thinwire.attach(model, optimizer, config), optimizer, 0, range(6))
        ends.append(small.model_bits(model) + small.optimizer_bits(optimizer))
    assert ends[0] == ends[1]


def test_a_plan_says_what_is_held() -> None:
    model = small.mlp()
    what = Workload(name="images", model=model, optimizer=AdamW, steps=9, inputs=(small.batch(0, 0)[0],))
    plan = simulate(what, WAYS["onebit"], arrange(0, [0, 0], 1), predicted.typical)
    held = plan.memory["train"].method["frozen second moments"]
    assert held == 4 * sum(p.numel() for p in model.parameters())


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="needs a warm-up, which makes the second moments, not `warmup`=0"):
        thinwire.OneBit(freeze_second_moment=True)
    with pytest.raises(ConfigError, match="`freeze_second_moment`='yes'"):
        thinwire.OneBit(warmup=2, freeze_second_moment="yes")  # type: ignore[arg-type]


def others(rank: int) -> list[str]:
    said = []
    for kind in (SGD, NAdam):
        model = small.mlp()
        with pytest.raises(ConfigError) as caught:
            thinwire.attach(model, kind(model.parameters(), lr=0.1), WAYS["onebit"])
        said.append(str(caught.value))
    return said


def test_other_optimizers_are_refused_by_name() -> None:
    said = "`freeze_second_moment` is for torch's Adam and AdamW, not for {}; leave it out, then second moments follow"
    for found in gang.run(others, 2):
        assert [text.startswith(said.format(name)) for text, name in zip(found, ("SGD", "NAdam"))] == [True, True]
