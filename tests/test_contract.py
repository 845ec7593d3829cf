"""The contract of every registered method, with the config that it gives as its example, in two layouts.

A third party's method is tested alike: the example of docs/extending.md is among them.
"""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
import small
import thinwire
from every_method import BUILT_IN, STEPS
from selection import first_of
from sockets import needs_counts, socket_bytes
from thinwire.base.errors import ConfigError
from thinwire.config.settings import from_strings
from thinwire.exchange import gradients
from thinwire.methods.registry import METHODS, name_of
from trajectories import LAYOUTS, adamw

methods = pytest.mark.parametrize("name", METHODS)
methods_but_examples_are_slow = pytest.mark.parametrize(
    "name", [*BUILT_IN, *(pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name not in BUILT_IN)]
)
# Two workers are the quickest; the larger worlds of `trajectories` are slow.
WORLDS = {"2 groups of 1": (2, 1), **LAYOUTS}
worlds = pytest.mark.parametrize("world", first_of(WORLDS))


def example(name: str, **fields: Any) -> Any:
    return METHODS[name].example(**fields)


# Checkpoints and evaluation.

SAVES = (7, 14)


def saved_and_resumed(rank: int, group_size: int, folder: str, built_in: bool) -> dict[str, list[str]]:
    """For each method the bits that a run ends with, and those of runs that resumed it from each save."""
    found = {}
    for name in (name for name in METHODS if (name in BUILT_IN) == built_in):
        config, place = example(name, group_size=group_size), Path(folder) / name
        found[name] = [_train(rank, config, place, start) for start in (0, *SAVES)]
    return found


def _train(rank: int, config: Any, place: Path, start: int) -> str:
    model = small.net(start, smooth=True)
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, config)
    if start:
        replica.load(place / str(start))
    for number in range(start, STEPS):
        small.step(replica, optimizer, rank, number)
        if replica.step in SAVES:
            # Both sides save: that wraps DDP again, and gloo's order of summation depends on its buckets.
            replica.save(place / (str(replica.step) if start == 0 else f"{start}-{replica.step}"))
            before = small.model_bits(model)
            with replica.merged():
                assert replica.wire.agree([*model.parameters(), *model.buffers()], "checksums"), "one model"
            assert small.model_bits(model) == before, "merged() gives the group's own model back"
    return small.model_bits(model)[:16] + small.optimizer_bits(optimizer)[:16] + small.model_bits(replica.finish())[:16]


@functools.cache
def resumed(world: str, built_in: bool) -> list[dict[str, list[str]]]:
    workers, size = WORLDS[world]
    with tempfile.TemporaryDirectory() as folder:
        return gang.run(saved_and_resumed, workers, size, folder, built_in)


@worlds
@methods_but_examples_are_slow
def test_resuming_anywhere_is_as_if_never_stopped(name: str, world: str) -> None:
    for worker in resumed(world, name in BUILT_IN):
        whole, *others = worker[name]
        assert others == [whole] * len(SAVES)


# Bytes.


def counted_and_sent(rank: int, group_size: int) -> dict[str, tuple[int, int]]:
    """By method, what the ledger counted and what this worker's sockets sent."""
    return {name: _count(rank, example(name, group_size=group_size)) for name in METHODS}


def _count(rank: int, config: Any) -> tuple[int, int]:
    """With a model that is big enough for its own bytes to outweigh everything around them."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 600), nn.BatchNorm1d(600), nn.Linear(600, 600), nn.Linear(600, 10)
    )
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, config)
    replica.wire.barrier("before")
    before, sent = replica.traffic.slow_bytes + replica.traffic.fast_bytes, socket_bytes()
    for number in range(STEPS):
        small.step(replica, optimizer, rank, number)
    replica.wire.barrier("after")
    return replica.traffic.slow_bytes + replica.traffic.fast_bytes - before, socket_bytes() - sent


@functools.cache
def counted(world: str) -> list[dict[str, tuple[int, int]]]:
    return gang.run(counted_and_sent, *WORLDS[world])


@pytest.mark.slow
@needs_counts
@worlds
@methods
def test_the_ledger_counts_what_the_kernel_sends(name: str, world: str) -> None:
    """Over all workers: the ledger of a node has what all of its workers sent, so one of each is asked."""
    workers, size = WORLDS[world]
    ledger = sum(worker[name][0] for worker in counted(world)[::size])
    sent = sum(worker[name][1] for worker in counted(world))
    # Messages have headers of gloo's own.
    assert ledger <= sent <= 1.03 * ledger + 50_000 * workers


# Bad input, and one worker.


@methods
def test_bad_settings_are_refused(name: str) -> None:
    for group_size in (0, -1, 1.5, "all"):
        with pytest.raises(ConfigError, match="group_size"):
            example(name, group_size=group_size)
    with pytest.raises(ConfigError, match="'nosuch'"):
        from_strings(METHODS[name].config, {"nosuch": "1"})
    with pytest.raises(TypeError, match="nosuch"):
        example(name, nosuch=1)
    assert name_of(example(name)) == name and METHODS[name].summary
    for field in ("wire", "warmup_wire"):
        if field in {each.name for each in dataclasses.fields(METHODS[name].config)}:
            with pytest.raises(ConfigError, match=f"`{field}`='int3'.*lowrank:R"):
                example(name, **{field: "int3"})


@methods
def test_one_worker_trains_and_sends_nothing(name: str) -> None:
    model = small.net(smooth=True)
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, example(name))
    losses = [float(small.step(replica, optimizer, 0, number % 3)) for number in range(STEPS)]
    with replica.merged():
        assert replica.in_sync
    finished = replica.finish()
    assert losses[-1] < losses[0] and finished(small.batch(0, 0)[0]).shape == (6, 10)
    assert replica.traffic.slow_bytes == replica.traffic.fast_bytes == 0


def test_moments_are_averaged_where_a_config_says_so() -> None:
    """Of others an optimizer may keep what nobody knows how to average."""
    for name in METHODS:
        config = example(name)
        model = small.mlp()
        replica = thinwire.attach(model, adamw(model), config)
        says = getattr(config, "moments", None) in ("average", "carry")
        assert replica._method.averages_moments == says or name.startswith(("ab", "oialr", "desloc")), name
        replica.detach()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match=r"'localsgd' is taken by LocalSGD"):
        thinwire.register("localsgd")(type("Other", (), {}))


# Buckets.

CODES = ("int8", "int4", "int2", "bit", "lowrank:2", "topk:0.1")


def in_many_buckets(rank: int, group_size: int) -> dict[str, list[Any]]:
    """By code, what a worker holds in the end if each parameter has a bucket of its own, and its last loss."""
    found = {}
    usual = gradients._BUCKET
    for code, limits in itertools.product(CODES, (dict.fromkeys(usual, 1), usual)):
        gradients._BUCKET = limits
        model = small.net(smooth=True)
        optimizer = adamw(model)
        replica = thinwire.attach(model, optimizer, thinwire.AllReduce(wire=code, group_size=group_size))
        losses = [float(small.step(replica, optimizer, rank, number % 2)) for number in range(12)]
        found.setdefault(code, []).append((len(replica._method.gradients.buckets), small.model_bits(model), losses))
    return found


def cut_into_buckets(rank: int) -> list[tuple[list[int], int]]:
    """The elements of each bucket, in the order of its parameters, and the limit, where buckets hold some of them."""
    whole, found = gradients._BUCKET, []
    try:
        for limit in (400, 1200):
            gradients._BUCKET = dict.fromkeys(whole, 4 * limit)
            model = small.net()
            replica = thinwire.attach(model, adamw(model), thinwire.AllReduce(wire="int8"))
            sizes, places = [p.numel() for p in model.parameters()], replica._method.gradients._places
            assert [*itertools.chain(*places[::-1])] == [*range(len(sizes))], "from the last layer on"
            found += [([sizes[i] for i in place], limit) for place in places]
    finally:
        gradients._BUCKET = whole
    return found


def test_a_bucket_is_filled_up_to_its_limit() -> None:
    found, _ = gang.run(cut_into_buckets, 2)
    for sizes, limit in found:
        assert sum(sizes) <= limit or len(sizes) == 1
    for (later, limit), (earlier, other) in itertools.pairwise(found):
        assert limit != other or sum(later) + earlier[-1] > limit


@pytest.mark.slow
@worlds
def test_buckets_are_exchanged_one_by_one(world: str) -> None:
    workers = gang.run(in_many_buckets, *WORLDS[world])
    for code in CODES:
        assert [count for count, _, _ in workers[0][code]] == [10, 1]
        for way in (0, 1):
            assert len({worker[code][way][1] for worker in workers}) == 1, (code, way)
        many, one = (losses for _, _, losses in workers[0][code])
        assert many == pytest.approx(one, rel=0.05), code


@pytest.mark.slow
def test_the_command_line_finds_methods_of_installed_packages(tmp_path: Path) -> None:
    """By an entry point, as the metadata of a package has it."""
    package = tmp_path / "stranger-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[thinwire.methods]\ngossip = gossip\nbroken = nosuch_module\n")
    examples = Path(__file__).parents[1] / "examples"
    words = [sys.executable, "-m", "thinwire", "list"]
    path = os.pathsep.join([str(tmp_path), str(examples), *sys.path])
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "gossip" in done.stdout
    assert "the method `broken` (`nosuch_module`) cannot be imported" in done.stderr
