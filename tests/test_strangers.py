"""Files from strangers: they are read or refused in words, run no code, and nothing is written outside their folder."""

import gzip
import importlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import needs
import small
import thinwire
from covering import few
from thinwire import ConfigError
from thinwire.base.errors import DamagedError, printable
from thinwire.base.files import lines_of, parse_json, read_json, read_tensors, write_json
from thinwire.base.schema import ANY, COUNT, FLAG, NUMBER, TEXT, Record, Row, like, wrong
from thinwire.checkpoint import saves
from thinwire.cli import main
from thinwire.factor.load_exported import load
from thinwire.factor.stability import compare
from thinwire.netbench import hosts
from thinwire.train import data
from thinwire.train.data import digits

FAULTS = Path(__file__).parents[1] / "benchmarks" / "faults"
fuzzed = needs.part("benchmarks", None if FAULTS.is_dir() else "they are not in this copy")


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAULTS)
        yield importlib.import_module("fuzz")
        for name in ("fuzz", "mutate", "tiny"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def originals(fuzz: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("originals")
    fuzz.make_originals(top)
    return top


# Fuzzing; benchmarks/faults/README.md has 5,000 cases.


SLOW = (
    "report",
    "report --json",
    "compare --resume",
    "export",
    "export --rank",
    "export, unfinished",
    "export, in groups",
)
"""Entrances that draw or trace; in the quick suite only a few cases go through them."""


@pytest.mark.slow
@fuzzed
@pytest.mark.parametrize(
    "numbers",
    [range(16), pytest.param(few(150, range(800)), marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_changed_files_are_opened_or_refused_in_words(
    numbers: Sequence[int], fuzz: ModuleType, originals: Path
) -> None:
    drawn = [number for number in numbers if fuzz.entrance_of(number, 1) in SLOW]
    chosen = set(numbers) - (set(drawn[2:]) if len(numbers) < 100 else set())
    outcomes, findings = fuzz.fuzz(sorted(chosen), 1, originals)
    assert not findings, "\n".join(f"{f.number}, {f.entrance}, {f.change}: {f.what}\n{f.trace}" for f in findings)
    assert outcomes["opened"] > 0.1 * len(chosen) and outcomes["refused"] > 0.3 * len(chosen)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def _takes_memory() -> None:
    torch.ones(1 << 40)


@fuzzed
@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda: None, ""),
        (lambda: pickle.loads(pickle.dumps(RunsCode())), "os.system"),
        (lambda: Path("../outside").write_text("x"), "open"),
        (lambda: Path("../outside").symlink_to("x"), "os.symlink"),
        (lambda: Path("link").write_text("x"), "open"),
        (lambda: {}["x"], "KeyError"),
        (_takes_memory, "RuntimeError"),
    ],
    ids=["nothing", "code", "a write", "a link", "through a link", "no message", "memory"],
)
def test_the_fuzzer_notices(
    read: Callable[[], Any], what: str, fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "target")
    monkeypatch.chdir(tmp_path / "inside")
    fuzz.fuzz(range(0), 0, tmp_path)  # hooks in
    with fuzz.limited_memory():
        outcome, found, _ = fuzz._watched(read, tmp_path / "inside")
    assert what in " ".join([found, *fuzz.WATCH.seen])
    assert bool(what) == (outcome == "finding" or bool(fuzz.WATCH.seen))


# JSON.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested too deeply"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ("1" * 5000, "Exceeds the limit"),
        ("{", "Expecting property name"),
        (b"\xff\xfe\x00", "codec can't decode"),
    ],
)
def test_json_that_cannot_be_read_is_a_value_error(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


SCHEMA = {
    "step": COUNT,
    "note?": TEXT,
    "layers": {str: [NUMBER]},
    "best": (None, {"on": FLAG}),
    "pair": Row([COUNT] * 2),
}
FITS: dict[str, Any] = {"step": 1, "layers": {"a": [0.5, 2]}, "best": None, "pair": [1, 2], "other": "ignored"}


def test_values_that_fit_a_schema() -> None:
    assert wrong(FITS, SCHEMA) is None
    assert wrong(FITS | {"note": "x", "best": {"on": True}}, SCHEMA) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": -1}, "'step' is -1, not a whole number from 0 on"),
        ({"step": True}, "'step' is True"),
        ({"step": 10**400}, "'step' is 1000"),
        ({"step": 1.0}, "'step' is 1.0"),
        ({"layers": []}, r"'layers' is \[\], not an object"),
        ({"layers": {"a": [float("nan")]}}, r"'layers.a\[0\]' is nan, not a finite number"),
        ({"layers": {"\x1b[2J": []}}, "'a name in layers' is"),
        ({"note": "a" * 2000}, "'note' is 2,000 characters, not a text"),
        ({"note": "\ud800"}, "'note' is"),
        ({"best": {"on": 1}}, "'best.on' is 1, not true or false"),
        ({"pair": [1]}, r"'pair' is \[1\], not a list of 2"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(change: dict[str, Any], why: str) -> None:
    found = wrong(FITS | change, SCHEMA)
    assert found is not None and re.search(why, found), found


def test_a_state_is_known_by_the_one_that_is_there() -> None:
    now = {"rounds": 0, "ratio": None, "code": "fp32", "ranks": {"a": 3}, "values": torch.zeros(2), "_on": False}
    schema = like(now, fresh=True)
    later = {"rounds": 9, "ratio": 0.5, "code": None, "ranks": {"b": 1}, "values": torch.ones(7), "_on": True}
    assert wrong(later, schema) is None
    for name, value in {"rounds": None, "code": 5, "ranks": {"a": "x"}, "values": [0.0], "wire": 1}.items():
        assert wrong(later | {name: value}, schema), name
    assert wrong(later | {"rounds": None}, like(now, fresh=False)) is None  # it may not have begun then


def test_a_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedError, match=r"a.json` is damaged, it has 1,099,511,627,776 bytes, more than"):
        read_json(path)
    with pytest.raises(DamagedError, match=r"a.json` is damaged, it has 1,099,511,627,776 bytes, more than"):
        read_tensors(path)
    path.unlink()
    os.mkfifo(path)  # reading it would wait forever
    with pytest.raises(DamagedError, match=r"a.json` is not a regular file; restore"):
        read_json(path)
    (tmp_path / "lines").write_bytes(b"x" * (9 << 20))
    with pytest.raises(DamagedError, match=r"a line has more than"):
        list(lines_of(tmp_path / "lines"))


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"link` is a link, and writing there would change another file; remove it"):
        write_json(tmp_path / "link", {})


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe` is neither a file nor a folder; remove it"):
        write_json(tmp_path / "pipe", {})


def test_messages_do_not_control_a_terminal() -> None:
    assert printable("a \x1b[2J\n\a é") == "a \\x1b[2J\n\\x07 é"


# Safetensors and models.


def _claims(file: Path, shape: list[int], size: int) -> None:
    """A header that promises more than is there."""
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


@pytest.mark.parametrize(("shape", "size"), [([2**40], 2**42), ([2**62, 4], 16), ([4], 2**40)])
def test_tensors_larger_than_their_file_are_refused(shape: list[int], size: int, tmp_path: Path) -> None:
    _claims(tmp_path / "x.safetensors", shape, size)
    with pytest.raises(DamagedError, match=r"x.safetensors` is damaged, not a valid safetensors file"):
        read_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a": torch.zeros(3)}, r"'a' as \[3\] in F32, here it is \[2\] in float32"),
        ({"a": torch.zeros(2, dtype=torch.int32)}, r"'a' as \[2\] in I32"),
        ({"b": torch.zeros(2)}, "'b' is in only one of the two"),
    ],
)
def test_tensors_are_compared_with_the_model_before_they_are_read(
    tensors: dict[str, torch.Tensor], why: str, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=why):
        read_tensors(tmp_path / "x.safetensors", expected={"a": torch.zeros(2)})


LAYER = {"kind": "sequential", "parts": [{"class": "Linear", "arguments": {"in_features": 4, "out_features": 2}}] * 2}


def _changed(**arguments: Any) -> dict[str, Any]:
    part = {"class": arguments.pop("cls", "Linear"), "arguments": {"in_features": 4, "out_features": 2} | arguments}
    return {"0": {"kind": "sequential", "parts": [part, part]}}


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        (_changed(out_features=10**12), "should have the shape"),
        (_changed(device="cpu", out_features=10**9), "unknown argument 'device'"),
        (_changed(cls="Embedding"), "KeyError: 'Embedding'"),
        (_changed(cls="Module"), "KeyError: 'Module'"),
        ({"__class__": LAYER}, "'__class__' in .* cannot be built"),
        ({"": {"kind": "parametrized", "weights": {"__dict__": [1, 1]}}}, "KeyError: '__dict__'"),
        ({"0": {"kind": "parametrized", "weights": {"weight": [10**9, 10**9]}}}, "should have the shape"),
        ([], "`layers` is not an object"),
        ({"0": 5}, "cannot be built"),
    ],
)
def test_layers_are_only_as_large_as_their_values(layers: Any, why: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "layers.json").write_text(json.dumps({"layers": layers}))
    with pytest.raises(ValueError, match=why):
        load(model, tmp_path)


def test_two_layers_have_the_inputs_and_outputs_of_one(tmp_path: Path) -> None:
    wide = nn.Sequential(nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 5)))
    save_file(wide.state_dict(), tmp_path / "model.safetensors")
    sizes = ({"in_features": 4, "out_features": 2, "bias": False}, {"in_features": 2, "out_features": 5})
    parts = [{"class": "Linear", "arguments": arguments} for arguments in sizes]
    (tmp_path / "layers.json").write_text(json.dumps({"layers": {"0": {"kind": "sequential", "parts": parts}}}))
    assert load(nn.Sequential(nn.Linear(4, 5)), tmp_path)(torch.zeros(1, 4)).shape == (1, 5)
    with pytest.raises(ValueError, match="do not fit in the place of Linear"):
        load(nn.Sequential(nn.Linear(4, 4)), tmp_path)


def test_thin_factors_of_an_enormous_weight_are_not_multiplied(tmp_path: Path) -> None:
    thin = {"x.weight_a": torch.zeros(10**7, 1), "x.weight_b": torch.zeros(1, 10**7)}
    save_file(thin, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match=r"`x` is \(10000000, 10000000\), too large to be compared"):
        compare(tmp_path / "x.safetensors", tmp_path / "x.safetensors")


def test_a_rank_is_that_of_the_factors(tmp_path: Path) -> None:
    def attached() -> Any:
        model = small.mlp()
        optimizer = small.sgd(model)
        return thinwire.attach(model, optimizer, thinwire.OIALR(total_steps=10, factor_at=2, cutoff=0.6)), optimizer

    replica, optimizer = attached()
    for _ in small.walk(replica, optimizer, 0, 4):
        pass
    replica.save(tmp_path / "save")
    attached()[0].load(tmp_path / "save")
    file = tmp_path / "save" / "state.json"
    state = json.loads(file.read_text())
    name = next(iter(state["method"]["shape"]["ranks"]))
    state["method"]["shape"]["ranks"][name] = 10**9
    file.write_text(json.dumps(state))
    saves.sign(file.parent)
    with pytest.raises(DamagedError, match=rf"the rank 1000000000 of '{name}' is not that in `model.safetensors`"):
        attached()[0].load(tmp_path / "save")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "parameters": (lambda saved: saved["param_groups"][0].update(params=[]), "it has 'params', which are the model's"),
    "a rate": (lambda saved: saved["param_groups"][0].update(lr="x"), "'param_groups.lr' is 'x', not a number"),
    "betas": (lambda saved: saved["param_groups"][0].update(betas=[0.9]), "is [0.9], not a list of 2"),
    "no step": (lambda saved: saved["param_groups"][0].update(betas=[1, 0.9]), "AdamW cannot step with its settings"),
    "another parameter": (lambda saved: saved["state"].update({"0.99.x": 1}), "of a parameter that is not here"),
    "no parameter": (lambda saved: saved["state"].update({"../x": 1}), "of a parameter that is not here"),
    "a moment": (lambda saved: saved["state"].update({"0.0.exp_avg": 1}), ""),  # the tensor of this name is taken
}


@pytest.mark.parametrize("what", CHANGES)
def test_settings_of_an_optimizer_are_of_their_kind(what: str, tmp_path: Path) -> None:
    def attached() -> Any:
        model = small.mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        return thinwire.attach(model, optimizer, thinwire.AllReduce()), optimizer

    replica, optimizer = attached()
    small.step(replica, optimizer, 0, 0)
    replica.save(tmp_path / "save")
    change, why = CHANGES[what]
    file = tmp_path / "save" / "optimizer.json"
    saved = json.loads(file.read_text())
    change(saved)
    file.write_text(json.dumps(saved))
    saves.sign(file.parent)
    other, optimizer = attached()
    if not why:
        other.load(tmp_path / "save")
        small.step(other, optimizer, 0, 1)
        return
    with pytest.raises(ConfigError, match=re.escape(why)):
        other.load(tmp_path / "save")


def test_state_that_an_optimizer_would_miss_is_reported(tmp_path: Path) -> None:
    model = small.mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    small.step(replica, optimizer, 0, 0)
    replica.save(tmp_path / "save")
    file = tmp_path / "save" / "optimizer.safetensors"
    tensors = load_file(file)
    save_file({name.replace("0.1.exp_avg_sq", "0.1.exp_avg_sr"): t for name, t in tensors.items()}, file)
    saves.sign(file.parent)
    with pytest.raises(DamagedError, match="has no valid 'exp_avg_sq'"):
        replica.load(tmp_path / "save")


# Run folders.


@pytest.fixture
def run(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "finished", tmp_path / "run"))


def _said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(words))
    return result.exit_code, result.output


@pytest.mark.slow
@fuzzed
def test_names_in_a_report_are_no_markup(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"recipe": "[/red]", "method": "[bold]x"}
    (run / "summary.json").write_text(json.dumps(summary))
    code, output = _said("report", str(run))
    assert code == 0 and "[/red]" in output and "[bold]x" in output


@pytest.mark.slow
@fuzzed
@pytest.mark.parametrize("name", ["comparison.json", "records.jsonl", "summary.new", "model", "checkpoint"])
def test_links_in_a_run_are_not_followed(name: str, run: Path, fuzz: ModuleType) -> None:
    mine = run.parent / "mine"
    mine.mkdir() if "." not in name else mine.write_text("mine")
    if (run / name).is_file():
        (run / name).unlink()
    elif (run / name).is_dir():
        (run / name).rename(run / "moved")
    (run / name).symlink_to(mine)
    if name == "comparison.json":
        code, output = _said("report", str(run))
    else:
        code, output = _said(*fuzz.AB, "--steps", "14", "--overwrite", "--out", str(run))
    assert code == 2 and f"`{run / name}` is a link" in output
    assert not list(mine.iterdir()) if mine.is_dir() else mine.read_text() == "mine"


@pytest.mark.slow
@fuzzed
def test_an_export_brings_its_own_loader_and_opens_no_program(run: Path, fuzz: ModuleType) -> None:
    (run / "model" / "load.py").write_text("raise SystemExit")
    (run / "model" / "more.py").write_text("raise SystemExit")
    (run / "model" / "program.pt2").write_bytes(pickle.dumps(RunsCode()))
    code, output = _said("export", str(run), "--recipe", fuzz.RECIPE, "--out", str(run / "small"))
    assert code == 0, output
    assert "def load(" in (run / "small" / "load.py").read_text() and not (run / "small" / "more.py").exists()


# Data.


def test_packed_data_is_unpacked_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LARGEST", 4 << 20)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(bytes(8 << 20)))
    with pytest.raises(ConfigError, match=r"x.txt.gz` holds more than 4,194,304 bytes"):
        data.unpacked(tmp_path / "x.txt.gz")
    with zipfile.ZipFile(tmp_path / "digits8x8.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", bytes(8 << 20))
    with pytest.raises(ConfigError, match=r"digits8x8.npz` is not what its name says.*unpacks to 8,388,608 bytes"):
        digits(tmp_path)


def test_arrays_are_not_unpickled(tmp_path: Path) -> None:
    held = io.BytesIO()
    np.savez(held, x=np.array([RunsCode()], dtype=object), y=np.zeros(1))
    (tmp_path / "digits8x8.npz").write_bytes(held.getvalue())
    with pytest.raises(ConfigError, match="Object arrays cannot be loaded when allow_pickle=False"):
        digits(tmp_path)


@pytest.mark.parametrize("change", [{"name": "../../x"}, {"namespaces": ["../x"]}, {"pid": "x"}, {"more": 1}, {}])
def test_a_record_of_hosts_names_only_its_own(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_RECORDS", tmp_path)
    record = {"name": "a", "pid": 1, "start": None, "namespaces": ["a-h0"], "keep": True}
    (tmp_path / "a.json").write_text(json.dumps(record | change))
    if not change:
        assert [found.name for found in hosts._records()] == ["a"]
        return
    with pytest.raises(thinwire.ThinwireError, match=r"a.json is not a valid netbench record .*; remove it"):
        hosts._records()


def test_any_schema_takes_anything() -> None:
    assert wrong(object(), ANY) is None
    assert wrong({"a": 1, "b": 2}, Record(a=COUNT)) == "it has 'b', which does not belong there"
