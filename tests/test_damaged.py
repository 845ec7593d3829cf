"""Files that are not what was written once: every command says which one, and what to do."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from thinwire.base.errors import DamagedError
from thinwire.base.files import read_json, read_tensors
from thinwire.cli import main

RUN = ["run", "digits", "--method", "allreduce", "--workers", "1", "--steps", "6", "--save-every", "4", "--quiet"]
RESUME = [*RUN, "--resume", "--out", "DIR"]
EXPORT = ["export", "DIR", "--out", "SMALL"]
CUT = [*EXPORT, "--rank", "2"]
REPORT = ["report", "DIR"]
SAVE = "checkpoint/step-000004"
STABILITY = ["stability", "DIR/model", "DIR/checkpoint"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = CliRunner().invoke(main, [*RUN, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def _half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _no_values(file: Path) -> None:
    file.write_text("{}")


def _a_list(file: Path) -> None:
    file.write_text("[1, 2]")


def _no_text(file: Path) -> None:
    file.write_bytes(b"\xff\x00\xfe")


def _broken_line(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[0], "\0\0\0\n", *lines[1:]]))


def _gone(file: Path) -> None:
    file.unlink()


CASES = [
    *(("summary.json", harm, words) for harm in (_half, _a_list, _no_text) for words in (REPORT, EXPORT, RESUME)),
    *(("summary.json", _no_values, words) for words in (REPORT, EXPORT)),
    ("records.jsonl", _broken_line, RESUME),
    *((f"{SAVE}/position.json", harm, words) for harm in (_half, _no_values) for words in (EXPORT, RESUME)),
    *((f"{SAVE}/state.json", harm, words) for harm in (_half, _gone) for words in (EXPORT, RESUME)),
    *((f"{SAVE}/model.safetensors", harm, words) for harm in (_half, _gone) for words in (EXPORT, RESUME)),
    (f"{SAVE}/optimizer.safetensors", _half, RESUME),
    (f"{SAVE}/random-0.safetensors", _half, RESUME),
    (f"{SAVE}/random-0.json", _no_values, RESUME),
    *(("model/model.safetensors", _half, words) for words in (CUT, STABILITY)),
    *(("model/layers.json", harm, words) for harm in (_half, _no_values, _a_list) for words in (CUT, STABILITY)),
]


@pytest.mark.parametrize(
    ("name", "harm", "words"), [pytest.param(*case, id=f"{case[0]}-{case[1].__name__}-{case[2][0]}") for case in CASES]
)
def test_a_damaged_file_is_named(
    name: str, harm: Callable[[Path], None], words: list[str], whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    if name.startswith("checkpoint") or (name, words[0]) == ("records.jsonl", "run"):
        (folder / "summary.json").unlink()  # the run is gone on with
    harm(folder / name)
    places = {"DIR": str(folder), "SMALL": str(tmp_path / "small")}
    result = CliRunner().invoke(
        main, [part.replace("DIR", places["DIR"]).replace("SMALL", places["SMALL"]) for part in words]
    )
    said = result.output.splitlines()[-1]
    assert result.exit_code == 2, result.output
    assert said.startswith("thinwire: ") and str(folder / name) in said
    assert any(remedy in said for remedy in ("restore", "older save", "again")), said


def test_a_report_has_its_table_where_records_are_damaged(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    _broken_line(tmp_path / "run" / "records.jsonl")
    result = CliRunner().invoke(main, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0 and "allreduce" in result.output
    assert f"no picture: `{tmp_path / 'run' / 'records.jsonl'}` is damaged in line 2" in result.output


def test_values_by_name(tmp_path):
    (tmp_path / "a.json").write_text('{"x": 1}')
    assert read_json(tmp_path / "a.json") == {"x": 1}
    with pytest.raises(
        DamagedError, match=r"a.json` is damaged, it has no 'y'; restore the file, or use an older save"
    ):
        read_json(tmp_path / "a.json")["y"]
    with pytest.raises(DamagedError, match=r"`.*b.safetensors` is missing"):
        read_tensors(tmp_path / "b.safetensors")
