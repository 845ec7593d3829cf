"""States and moving averages of a model in another shape are refused with words about what to do."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import small
import thinwire
from thinwire import ThinwireError


def config(**changes: Any) -> thinwire.AB:
    """Factors from step 4 on, and other ranks at step 8."""
    fields = {"total_steps": 12, "warmup": 2, "every": 2, "factor_at": 4, "redecompose": 2, "cutoff": 0.6}
    return thinwire.AB(**fields | changes)


def attached(**changes: Any) -> tuple[Any, Any, Any]:
    model = small.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return thinwire.attach(model, optimizer, config(**changes)), model, optimizer


def train(replica: Any, optimizer: Any, until: int) -> None:
    for number in range(replica.step, until):
        small.step(replica, optimizer, 0, number)


def test_a_state_from_before_factoring_names_what_brings_the_shape_back() -> None:
    replica, model, optimizer = attached()
    train(replica, optimizer, 3)
    early = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(replica, optimizer, 6)
    assert replica.phase == "factored"
    for load, state in ((model.load_state_dict, early[0]), (replica.load_state_dict, early[0])):
        with pytest.raises(
            ThinwireError, match=r"'conv.weight' is whole there.* rank .* here.*replica\.load\(folder\)"
        ):
            load(state)
    with pytest.raises(ThinwireError, match=r"parameter group 0 has \d+ parameters there.*replica\.load\(folder\)"):
        optimizer.load_state_dict(early[1])
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    train(replica, optimizer, 12)
    replica.finish()


def test_a_state_from_after_factoring_is_refused_too() -> None:
    replica, model, optimizer = attached()
    train(replica, optimizer, 6)
    late = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, whole, its = attached()
    train(other, its, 3)
    with pytest.raises(ThinwireError, match=r"'conv.weight_a' is a factor there, and 'conv.weight' is whole here"):
        whole.load_state_dict(late[0])
    with pytest.raises(ThinwireError, match="does not fit the optimizer"):
        its.load_state_dict(late[1])
    late[0]["middle.weight_a"] = late[0]["middle.weight_a"][:, :1]
    with pytest.raises(ThinwireError, match=r"the factors of 'middle.weight' have shapes \[\["):
        model.load_state_dict(late[0])
    late[1]["state"][4]["exp_avg"] = torch.zeros(3, 7)
    with pytest.raises(ThinwireError, match=r"'exp_avg' of parameter 4 is \[3, 7\] there"):
        optimizer.load_state_dict(late[1])
    for each in (replica, other):
        each.detach()
    with pytest.raises(RuntimeError, match="Error"):
        whole.load_state_dict(late[0])


@pytest.mark.parametrize("uses_buffers", [False, True])
def test_an_averaged_model_names_ema(uses_buffers: bool) -> None:
    model = small.net()
    before = AveragedModel(model, use_buffers=uses_buffers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, config())
    ema = thinwire.EMA(replica, 0.5)
    train(replica, optimizer, 3)
    for average in (before, ema):
        average.update_parameters(model)
    train(replica, optimizer, 6)
    with pytest.raises(ThinwireError, match=r"AveragedModel cannot follow.*thinwire\.EMA\(replica"):
        before.update_parameters(model)
    assert int(before.n_averaged) == 1
    ema.update_parameters(replica)
    other = torch.nn.Linear(2, 2)
    unlike = AveragedModel(other)
    unlike.update_parameters(other)


def test_a_save_that_factors_the_model_is_like_training_until_there(tmp_path: Path) -> None:
    replica, _, optimizer = attached()
    train(replica, optimizer, 6)
    replica.save(tmp_path / "save")
    other, model, _ = attached()
    average = AveragedModel(model)
    other.load(tmp_path / "save")
    with pytest.raises(ThinwireError, match=r"thinwire\.EMA"):
        average.update_parameters(model)


def test_a_copy_of_the_model_is_not_checked() -> None:
    replica, model, optimizer = attached()
    full = copy.deepcopy(model.state_dict())
    train(replica, optimizer, 6)
    copied = pickle.loads(pickle.dumps(model))
    torch.save(copy.deepcopy(model), io.BytesIO())
    with pytest.raises(RuntimeError, match="Missing key"):
        copied.load_state_dict(full)
