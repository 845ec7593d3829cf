"""Saves that do not fit, files that lie, and models that are not worth saving."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import gang
import small
import thinwire
from thinwire.base.errors import ConfigError, DivergedError, ThinwireError
from thinwire.checkpoint import saves


def attached(optimizer_of: Any = small.sgd, config: Any = None) -> tuple[Any, Any]:
    model = small.net()
    optimizer = optimizer_of(model)
    return thinwire.attach(model, optimizer, config or thinwire.AllReduce()), optimizer


@pytest.fixture
def save(tmp_path: Path) -> Path:
    replica, optimizer = attached(lambda model: torch.optim.AdamW(model.parameters()))
    small.step(replica, optimizer, 0, 0)
    replica.save(tmp_path / "save")
    return tmp_path / "save"


def error_of(folder: Path, optimizer_of: Any = lambda model: torch.optim.AdamW(model.parameters())) -> str:
    with pytest.raises(ThinwireError) as error:
        attached(optimizer_of)[0].load(folder)
    return str(error.value)


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.head.weight = self.table.weight


def test_weights_that_are_tied_come_back_and_stay_tied(tmp_path: Path) -> None:
    saved, loaded = Tied(), Tied()
    before, after = (thinwire.attach(model, small.sgd(model), thinwire.AllReduce()) for model in (saved, loaded))
    before.save(tmp_path / "save")
    after.load(tmp_path / "save")
    assert loaded.head.weight is loaded.table.weight and torch.equal(loaded.head.weight, saved.head.weight)


def test_state_of_another_optimizer_is_refused(save: Path) -> None:
    assert "trained by AdamW, attached is SGD, which keeps other state" in error_of(save, small.sgd)

    def two(model: Any) -> list[Any]:
        first, *rest = model.parameters()
        return [torch.optim.AdamW([first]), torch.optim.AdamW(rest)]

    assert "trained by AdamW, attached is AdamW, AdamW" in error_of(save, two)


def test_other_groups_of_parameters_are_refused_with_the_files_name(save: Path) -> None:
    def groups(model: Any) -> Any:
        first, *rest = model.parameters()
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}])

    said = error_of(save, groups)
    assert "optimizer.json holds 1 parameter groups, the optimizers here have 2" in said


def test_state_for_a_parameter_that_is_not_there_names_the_file(save: Path) -> None:
    file = save / "optimizer.safetensors"
    save_file({**load_file(file), "0.99.exp_avg": torch.zeros(2)}, file)
    saves.sign(save)
    assert "optimizer.json holds state '0.99.exp_avg' of a parameter that is not here" in error_of(save)


def test_state_of_another_shape_names_the_file(save: Path) -> None:
    file = save / "optimizer.safetensors"
    save_file({**load_file(file), "0.0.exp_avg": torch.zeros(2)}, file)
    saves.sign(save)
    assert "optimizer.json holds 'exp_avg' of shape [2] for a parameter of shape [8, 1, 3, 3]" in error_of(save)


@pytest.mark.parametrize("name", ["state.json", "optimizer.json", "worker-rank0.json"])
def test_broken_json_names_the_file(save: Path, name: str) -> None:
    text = (save / name).read_text()
    (save / name).write_text(text[: len(text) // 2])
    assert name in error_of(save)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_truncated_tensors_name_the_file(save: Path, name: str) -> None:
    content = (save / name).read_bytes()
    (save / name).write_bytes(content[:-20])
    assert name in error_of(save)


def test_a_missing_file_is_named(save: Path) -> None:
    (save / "optimizer.safetensors").unlink()
    assert "optimizer.safetensors" in error_of(save)


def test_a_value_that_lies_is_refused(save: Path) -> None:
    state = json.loads((save / "state.json").read_text())
    (save / "state.json").write_text(json.dumps({**state, "format": 99}))
    saves.sign(save)
    assert "has format 99" in error_of(save)


def test_a_phase_that_the_method_does_not_have_there_is_refused(save: Path) -> None:
    state = json.loads((save / "state.json").read_text())
    state["method"]["phase"] = "cool-down"
    (save / "state.json").write_text(json.dumps(state))
    saves.sign(save)
    assert "state.json" in (said := error_of(save)) and "phase 0 is not 'cool-down'" in said


# A NaN by one worker.


def train_on_a_nan(rank: int, folder: str) -> dict[str, str]:
    """As DDP does, all-reduce makes it everyone's; but no save is overwritten by it, and nothing is returned."""
    replica, optimizer = attached()
    small.step(replica, optimizer, rank, 0)
    replica.save(folder)
    x, y = small.batch(rank, 1)
    loss = F.cross_entropy(replica(x), y) * (float("nan") if rank == 1 else 1.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found = {}
    for call in (lambda: replica.save(folder), replica.finish):
        with pytest.raises(DivergedError) as error:
            call()
        found[str(len(found))] = str(error.value)
    replica.load(folder)
    small.step(replica, optimizer, rank, 1)
    found["end"] = small.model_bits(replica.finish())
    return found


def test_a_model_that_diverged_is_neither_saved_nor_returned(tmp_path: Path) -> None:
    here, there = gang.run(train_on_a_nan, 2, str(tmp_path / "save"))
    assert here == there
    assert here["0"].startswith("save(): parameter 'stem.weight' of rank 0 is not finite after step 2; resume from")
    assert here["1"].startswith("finish(): parameter 'stem.weight' of rank 0 is not finite after step 2")


def test_loading_says_what_is_wrong_before_it_changes_anything(save: Path) -> None:
    replica, _ = attached(small.sgd)
    before = small.model_bits(replica.module)
    with pytest.raises(ConfigError):
        replica.load(save)
    assert small.model_bits(replica.module) == before


@pytest.mark.parametrize("name", ["step-5", "step-5.writing"])
def test_a_save_that_is_half_removed_does_not_look_like_one(
    save: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process were killed in the middle; what is being written has no such name in the first place."""
    folder = save.rename(save.parent / name)
    doomed: list[Path] = []
    monkeypatch.setattr(saves.shutil, "rmtree", lambda path, **_: doomed.append(path))
    saves.remove(folder)
    assert folder.exists() == (name == "step-5.writing") and doomed[0].name.endswith((".removed", ".writing"))
