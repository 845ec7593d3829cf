import gzip
import os
import signal
import threading

import numpy as np
import pytest
import torch

from thinwire.base.errors import ConfigError
from thinwire.train import data
from thinwire.train.batcher import Prefetcher
from thinwire.train.data import Batches, read_whole, share
from thinwire.train.step_rng import StepRNG


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
    assert len(source.tokens) == 65
    x, y = source.train(np.array([0, 5]))
    assert x.shape == y.shape == (2, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert "".join(source.tokens[i] for i in x[0]) == "First Citizen:\nB"


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


def test_the_small_sets_may_be_damaged_too(tmp_path):
    (tmp_path / "digits8x8.npz").write_bytes((data.SHIPPED / "digits8x8.npz").read_bytes()[:-99])
    with pytest.raises(ConfigError, match=r"digits8x8\.npz` is not what its name says, or damaged"):
        data.digits(tmp_path)
    (tmp_path / "tinyshakespeare.txt.gz").write_bytes(gzip.compress(b"a b c")[:-6])
    with pytest.raises(ConfigError, match=r"tinyshakespeare\.txt\.gz` cannot be read"):
        data.shakespeare(tmp_path)


def _numbered(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(step), torch.tensor(-step)


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")}


def test_prefetching_gives_every_batch_in_its_turn():
    with Prefetcher(_numbered, range(3, 40), depth=3) as batches:
        seen = [(int(x), int(y)) for x, y in batches]
        assert next(batches, None) is None
    assert seen == [(step, -step) for step in range(3, 40)]
    assert not _threads()


def test_prefetching_goes_no_further_than_it_may():
    begun: list[int] = []
    at_fourth = threading.Event()

    def load(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        begun.append(step)
        if step == 3:
            at_fourth.set()
        return _numbered(step)

    with Prefetcher(load, range(100), depth=2) as batches:
        next(batches)
        next(batches)
        assert at_fourth.wait(30)  # two were taken, so two more may be loaded
    assert begun == [0, 1, 2, 3]
    assert not _threads()


def test_a_loader_that_fails_is_heard_where_its_batch_was_asked_for():
    def load(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 2:
            raise ConfigError("`c.jpg` is broken")
        return _numbered(step)

    seen = []
    with pytest.raises(ConfigError, match=r"c\.jpg"), Prefetcher(load, range(9)) as batches:
        seen += [int(x) for x, _ in batches]
        pytest.fail("the loop ended as if all were well")
    assert not _threads()
    with pytest.raises(KeyError), Prefetcher(_numbered, range(9)) as batches:
        raise KeyError(next(batches))
    assert not _threads()


def test_an_interrupt_is_heard_while_a_batch_is_waited_for():
    heard = threading.Event()

    def load(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.wait(30)
        return _numbered(step)

    with pytest.raises(KeyboardInterrupt), Prefetcher(load, range(9)) as batches:
        try:
            list(batches)
        finally:
            heard.set()
    assert not _threads()


def test_an_interpreter_that_stumbles_is_asked_again() -> None:
    answers = iter([SystemError("AST constructor recursion depth mismatch"), None])

    def read() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "whole"

    assert read_whole(read) == "whole"


# Random numbers.


def test_streams_seeds_and_steps_have_chance_of_their_own() -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]
    drawn = [StepRNG(seed, step, batch=4, stream=stream).uniform(8) for seed, step, stream in keys]
    for k, one in enumerate(drawn):
        assert not any(torch.isin(one, other).any() for other in drawn[:k])
    first, again = (StepRNG(0, 0, batch=4) for _ in range(2))
    assert torch.equal(first.uniform(8), drawn[0]) and torch.equal(again.uniform(8), drawn[0])
    assert not torch.equal(first.uniform(8), drawn[0])  # each call draws anew


def test_noise_is_drawn_in_blocks_and_the_same_for_any_number_of_workers() -> None:
    whole = StepRNG(3, 5, batch=150)
    first, second = whole.noise(3), whole.noise(3)
    assert first.shape == (150, 3) and not torch.equal(first, second) and len(first.unique()) == 450
    assert abs(first.mean()) < 0.2 and abs(first.std() - 1) < 0.1
    for workers in (2, 3, 7):
        parts = [StepRNG(3, 5, batch=150, rank=rank, world_size=workers) for rank in range(workers)]
        for wanted in (first, second):
            torch.testing.assert_close(torch.cat([part.noise(3) for part in parts]), wanted, rtol=0, atol=0)
