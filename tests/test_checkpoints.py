"""Saves that survive: damage is named, the save before is used, a kill at any moment and a full disk cost little."""

import contextlib
import functools
import json
import logging
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
import needs
import small
import thinwire
from patience import LIMIT_S, until
from thinwire.base.errors import DamagedError, SaveError
from thinwire.checkpoint import saves
from thinwire.recipes import named
from thinwire.train import fit
from thinwire.train.recorder import Recorder
from thinwire.train.run import prepare

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def attached(config: Any = None, seed: int = 0) -> tuple[Any, Any]:
    model = small.mlp(seed)
    optimizer = small.sgd(model)
    return thinwire.attach(model, optimizer, config or thinwire.AllReduce()), optimizer


# Damage.


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def cut_in_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def lose(file: Path) -> None:
    file.unlink()


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


HARMS = {
    cut_short: "is damaged, it has",
    flip_a_bit: "is damaged, its checksum is not that of what was saved",
    lose: "is missing",
    make_a_folder: "",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "save"
    replica, optimizer = attached(small.ab(group_size=1))
    list(small.walk(replica, optimizer, 0, 5))
    replica.save(folder)
    return folder


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_damage_to_any_file_is_named_before_anything_is_loaded(harm: Callable[[Path], None], whole, tmp_path) -> None:
    replica, _ = attached(small.ab(group_size=1), seed=1)
    before = small.model_bits(replica.module)
    names = {path.name for path in whole.iterdir()}
    assert names - {saves.MANIFEST} == set(json.loads((whole / saves.MANIFEST).read_text())["files"])
    for name in names - {saves.MANIFEST}:
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        harm(folder / name)
        with pytest.raises(DamagedError, match="restore the file, or use an older save") as error:
            replica.load(folder)
        assert f"`{folder / name}`" in str(error.value) and HARMS[harm] in str(error.value)
    assert small.model_bits(replica.module) == before


@pytest.mark.parametrize("harm", [cut_in_half, lose, flip_a_bit], ids=lambda harm: harm.__name__)
def test_a_damaged_manifest_is_found_as_well(harm: Callable[[Path], None], whole, tmp_path) -> None:
    shutil.copytree(whole, tmp_path / "save")
    harm(tmp_path / "save" / saves.MANIFEST)
    with pytest.raises(DamagedError, match="restore the file, or use an older save"):
        attached(small.ab(group_size=1))[0].load(tmp_path / "save")


# Runs.

STEPS = {"steps": 10, "eval_every": 100}


def train(out: Path, **more: Any) -> dict[str, Any]:
    return fit(named("digits", **STEPS), thinwire.AllReduce(), out=out, model=False, **more)


def steps_in(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoint").iterdir())


def test_the_last_saves_are_kept_and_files_of_others_are_not_touched(tmp_path) -> None:
    train(tmp_path, save_every=2, until=5)
    assert steps_in(tmp_path) == ["step-000004", "step-000005"]
    foreign = [tmp_path / "checkpoint" / name for name in ("mine", "step-000004/mine", "step-x/mine")]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    train(tmp_path, save_every=1, keep=3, resume=True)
    assert steps_in(tmp_path) == ["mine", "step-000004", "step-000007", "step-000008", "step-000009", "step-x"]
    train(tmp_path, overwrite=True)
    assert steps_in(tmp_path) == ["mine", "step-000004", "step-x"]
    assert all(path.read_text() == "mine" for path in foreign) and len(list(foreign[1].parent.iterdir())) == 1


def test_a_damaged_save_is_reported_and_the_one_before_is_used(tmp_path, caplog) -> None:
    unbroken = train(tmp_path / "unbroken", save_every=2)
    train(tmp_path / "run", save_every=2, until=6)
    bad = tmp_path / "run" / "checkpoint" / "step-000006" / "model.safetensors"
    flip_a_bit(bad)
    with caplog.at_level(logging.WARNING, "thinwire"):
        found = saves.find_sound(bad.parent.parent)  # as a reader of files does, with no other workers
    assert found == bad.parent.with_name("step-000004") and f"using the save before it, `{found}`" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "thinwire"):
        resumed = train(tmp_path / "run", save_every=2, resume=True)
    said = caplog.text
    assert f"a save is damaged and is not used: `{bad}` is damaged, its checksum" in said
    assert f"using the save before it, `{bad.parent.with_name('step-000004')}`" in said
    assert (resumed["accuracy"], resumed["loss"]) == (unbroken["accuracy"], unbroken["loss"])


def test_it_is_an_error_only_if_no_save_is_sound(tmp_path) -> None:
    train(tmp_path, save_every=2, until=6)
    before = steps_in(tmp_path)
    for name in before:
        lose(tmp_path / "checkpoint" / name / "state.json")
    with pytest.raises(DamagedError, match=r"step-000004/state.json` is missing"):
        train(tmp_path, resume=True)
    assert steps_in(tmp_path) == before and (tmp_path / "records.jsonl").is_file()


def resume_from_ones_own(rank: int, folder: str) -> int:
    """The step that a worker goes on from if each has a copy of the run, and the last save of one is damaged."""
    recipe, config, own = named("digits", **STEPS), thinwire.AllReduce(), Path(folder, str(rank))
    fit(recipe, config, out=Path(folder, "run"), save_every=2, until=6, model=False)
    shutil.copytree(Path(folder, "run"), own, ignore=shutil.ignore_patterns(".lock"))  # rank 0 may still hold it
    if rank == 1:
        for name in ("worker-rank0.safetensors", "worker-rank1.safetensors"):  # it checks one of the two
            flip_a_bit(own / "checkpoint" / "step-000006" / name)
    with contextlib.ExitStack() as held:
        return prepare(recipe, config, own, 0, None, resume=True, held=held).replica.step


def test_workers_agree_on_the_save_they_resume_from(tmp_path) -> None:
    assert gang.run(resume_from_ones_own, 2, str(tmp_path)) == [4, 4]


# In the background.


def changes_while_it_is_written(rank: int, folder: str) -> tuple[str, str, str]:
    """A model as it was saved, as it is when the save is in place, and as it is loaded."""
    replica, optimizer = attached(thinwire.LocalSGD(every=3))
    small.step(replica, optimizer, rank, 0)
    saved = small.model_bits(replica.module)
    replica.save(folder, wait=False)
    for step in range(1, 5):
        small.step(replica, optimizer, rank, step)
    replica.wait_for_save()
    later = small.model_bits(replica.module)
    replica.load(folder)
    return saved, later, small.model_bits(replica.module)


def test_a_save_holds_what_was_there_when_it_was_begun(tmp_path) -> None:
    for saved, later, loaded in gang.run(changes_while_it_is_written, 2, str(tmp_path / "save")):
        assert saved == loaded != later


def cannot_write(rank: int, folder: str) -> list[str]:
    """Errors of one worker's writer, as this worker hears of them."""
    replica, optimizer = attached(thinwire.LocalSGD(every=4))
    found = []
    calls = {"a": lambda: replica.save(f"{folder}/next"), "b": replica.wait_for_save, "c": replica.finish}
    for name, call in calls.items():
        small.step(replica, optimizer, rank, 0)
        limit = resource.RLIM_INFINITY if rank == 0 else 1 << 14
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        replica.save(f"{folder}/{name}", wait=False)
        until(lambda: not replica._save._thread.is_alive(), "the writer")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        try:
            call()
        except SaveError as error:
            found.append(str(error))
    return found


def test_a_writer_that_fails_is_reported_on_all_workers_and_ends_nothing(tmp_path) -> None:
    first, second = gang.run(cannot_write, 2, str(tmp_path))
    assert first == second and len(first) == 2  # finish() warns, and returns the model
    for name, text in zip("ab", first, strict=True):
        assert f"{name}` was not written: rank 1: File too large: {tmp_path / name}.writing/model-rank1" in text
    assert [path.name for path in tmp_path.iterdir()] == ["next"]


# Killed.


def saves_every_step(out: str) -> None:
    torch.set_num_threads(1)
    fit(named("digits", steps=10_000), thinwire.AllReduce(), out=out, save_every=1)


@pytest.mark.parametrize("times", [4, slow(30)])
def test_a_process_killed_at_any_moment_leaves_a_sound_save(times: int, tmp_path) -> None:
    moments = random.Random(times)
    for number in range(times):
        out = tmp_path / str(number)
        process = gang.start(saves_every_step, str(out))
        until(lambda out=out: saves.find(out / "checkpoint"), "a save")
        time.sleep(moments.random() * 0.2)
        process.kill()
        process.join(LIMIT_S)
        at = json.loads((saves.find_sound(out / "checkpoint") / "position.json").read_text())["step"]
        recipe = named("digits", steps=10_000)
        assert fit(recipe, thinwire.AllReduce(), out=out, resume=True, until=at + 1)["stopped_at"] == at + 1
        assert len(steps_in(out)) == 2  # what the killed process left behind is gone as well
        shutil.rmtree(out)


# Disks that refuse.


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A real file system of 4 MB: room for one save of `digits`, and not for two."""
    needs.mounted(tmp_path, "4m")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_full_disk_costs_a_save_and_not_the_run(disk, caplog) -> None:
    with caplog.at_level(logging.WARNING, "thinwire"):
        train(disk / "run", save_every=2)
    said = [text for text in caplog.messages if "was not written" in text]
    assert steps_in(disk / "run") == ["step-000002"] and len(said) == 3
    assert "rank 0: No space left on device: " in said[0] and said[0].endswith("; training goes on")
    assert saves.find_sound(disk / "run" / "checkpoint").name == "step-000002"


def test_records_that_a_full_disk_refused_are_written_later(disk, caplog) -> None:
    recorder = Recorder(disk / "records.jsonl", active=lambda: True)
    filled = disk / "filled"
    with filled.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    for step in range(200):
        recorder.write("step", step=step, padding="x" * 100)
    filled.unlink()
    recorder.write("step", step=200)
    recorder.close()
    assert [json.loads(line)["step"] for line in (disk / "records.jsonl").read_text().splitlines()] == list(range(201))
    assert len([text for text in caplog.messages if "No space left on device" in text]) == 1


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_kept_elsewhere(disk, tmp_path_factory, monkeypatch) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    recipe = named("digits", **STEPS)
    with pytest.raises(SaveError) as error:
        fit(recipe, thinwire.AllReduce(), out=disk / "run", save_every=4)
    (place,) = elsewhere.iterdir()
    assert "could not be written: No space left on device" in str(error.value)
    assert f"it is in `{place}`" in str(error.value)
    summary = json.loads((place / "summary.json").read_text())
    assert f"accuracy {summary['accuracy']:.4g}" in str(error.value)
    assert (place / "model" / "model.safetensors").is_file() and not (disk / "run" / "summary.json").exists()


def test_a_read_only_folder_costs_saves_and_not_the_run(disk, caplog) -> None:
    (disk / "run" / "checkpoint").mkdir(parents=True)
    mounted = str(disk / "run" / "checkpoint")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", mounted], check=True)
    try:
        with caplog.at_level(logging.WARNING, "thinwire"):
            summary = train(disk / "run", save_every=4, resume=True)
    finally:
        subprocess.run(["umount", "--lazy", mounted], check=True)
    said = [text for text in caplog.messages if "training goes on" in text]
    assert summary["steps"] == 10 and (disk / "run" / "summary.json").is_file()
    assert len(said) == 2 and all(f"Read-only file system: {mounted}/step-00000" in text for text in said)


def test_the_save_a_run_stops_with_must_be_written(disk) -> None:
    train(disk / "run", until=2)
    with pytest.raises(SaveError, match="step-000003` was not written: rank 0: No space left on device"):
        train(disk / "run", until=3, resume=True)
    assert saves.find_sound(disk / "run" / "checkpoint").name == "step-000002"
