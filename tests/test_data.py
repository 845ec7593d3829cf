import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.train import data
from thinwire.train.data import Batches, share


def test_digits_are_split_once_and_for_all():
    source = data.digits()
    assert (source.train_size, source.heldout_size) == (1257, 540)
    assert not set(source.train_rows) & set(source.heldout_rows)
    x, y = source.heldout(np.arange(540))
    assert x.shape == (540, 1, 8, 8) and x.min() >= -1 and x.max() <= 1
    assert set(y.tolist()) == set(range(10))
    assert torch.equal(x, data.digits().heldout(np.arange(540))[0])


def test_text_predicts_the_next_character():
    source = data.shakespeare(block=16, heldout=1000)
    assert len(source.characters) == 65
    x, y = source.train(np.array([0, 5]))
    assert x.shape == y.shape == (2, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert "".join(source.characters[i] for i in x[0]) == "First Citizen:\nB"


def test_heldout_text_is_covered_once():
    source = data.shakespeare(block=16, heldout=1000)
    x, _ = source.heldout(np.arange(source.heldout_size))
    assert torch.equal(x.flatten(), source.heldout_ids[: x.numel()].long())
    assert len(source.heldout_ids) - x.numel() <= 16 + 1


def test_batches_follow_from_seed_and_step():
    one, two = (Batches(size=100, batch=32, seed=3) for _ in range(2))
    later_first = two.indices(7)
    assert np.array_equal(one.indices(0), two.indices(0))
    assert np.array_equal(one.indices(7), later_first)
    assert not np.array_equal(one.indices(0), Batches(size=100, batch=32, seed=4).indices(0))


def test_every_example_once_an_epoch():
    batches = Batches(size=96, batch=36, seed=0)
    seen = np.concatenate([batches.indices(step) for step in range(8)])  # three epochs
    for epoch in range(3):
        assert sorted(seen[96 * epoch : 96 * (epoch + 1)]) == list(range(96))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_workers_share_the_same_global_batch(world_size):
    batch = Batches(size=500, batch=64, seed=1).indices(2)
    parts = [share(batch, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(parts), batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_folder_may_stand_in_for_the_package(tmp_path):
    (tmp_path / "digits8x8.npz").write_bytes((data.SHIPPED / "digits8x8.npz").read_bytes())
    assert torch.equal(data.digits(tmp_path).x, data.digits().x)
    with pytest.raises(ConfigError, match=r"no `tinyshakespeare.txt.gz` in `.*`; give a folder"):
        data.shakespeare(tmp_path)
