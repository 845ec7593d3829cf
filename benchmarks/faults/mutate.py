"""Files as a careless or hostile person would leave them: cut off, with flipped bits, or wrong on purpose."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OUTSIDE = "../outside/marked"
"""A place next to the folder that nothing may change; hostile names and links lead there."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 10**18, 10**400, -(10**30), 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "0",
        "nan",
        "a" * 5000,
        "../../x",
        OUTSIDE,
        "/etc/passwd",
        "..",
        "\0",
        "\x1b[2J\x1b]0;x\a",
        "[/red]",
        "$\\frac$",
    ),
    *("__class__", "forward", "params", "weight_a", "é\ud800"),
    *([], {}, [[]], [None], [0, 1, 2], ["x"], {"": None}, {"tensor": "x"}, {"tensor": []}, {"x": {"x": 1}}),
    *([0] * 3000, [1e308, -1], [[0], [0]], {"__import__('os').system('x')": 1}),
)
DTYPES = ("F16", "F64", "I64", "U8", "BOOL", "BF16", "C64", "F8_E4M3", "X", "")


def mutate(file: Path, rng: random.Random) -> str:
    """Change one file in place; returns how."""
    ways: list[Callable[[Path, random.Random], None]] = [truncate, flip, splice, zeros, replace, link]
    if file.suffix in (".json", ".jsonl"):
        ways += [wrong_value, wrong_value, wrong_value, wrong_value, wrong_key, deep, twice] * 2
    if file.suffix == ".safetensors":
        ways += [wrong_header, wrong_header, wrong_header] * 3
    way = rng.choice(ways)
    way(file, rng)
    return way.__name__


def truncate(file: Path, rng: random.Random) -> None:
    """Keep a part, or nothing."""
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def flip(file: Path, rng: random.Random) -> None:
    """Flip bits, more often near the start, where formats keep their structure."""
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8, 64)) if data else 0):
        at = rng.randrange(min(len(data), rng.choice((8, 64, 1024, 10**9))))
        data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def splice(file: Path, rng: random.Random) -> None:
    """Copy a part of the file over or between others."""
    data = file.read_bytes()
    start, end, at = (rng.randrange(len(data) + 1) for _ in range(3))
    part = data[start : min(end, start + 4096)]
    file.write_bytes(data[:at] + part + data[at + rng.choice((0, len(part))) :])


def zeros(file: Path, rng: random.Random) -> None:
    """Zeros, as a crash of the system leaves them."""
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 512, 4096)))
    data[at:end] = bytes(end - at)
    file.write_bytes(data)


def replace(file: Path, rng: random.Random) -> None:
    """Another thing of the same name: a folder, a pipe, text of another kind, a sparse file of many gigabytes."""
    file.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    elif kind == 2:
        file.write_bytes(rng.choice((b"", b"null", b"[]", b"{}", b"1", b'"x"', b"\xff\xfe", b"\x80\x04N.")))
    elif kind == 3:
        file.write_bytes(rng.randbytes(300))
    else:
        file.touch()
        os.truncate(file, 1 << 36)


def link(file: Path, rng: random.Random) -> None:
    """A link to a file outside, to nothing, or to a device."""
    data = file.read_bytes()
    file.unlink()
    outside = _outside(file)
    if rng.random() < 0.5:
        outside.write_bytes(data)
        file.symlink_to(outside)
    else:
        file.symlink_to(rng.choice((outside.with_name("missing"), Path("/dev/zero"), file)))


def plant(folder: Path, rng: random.Random) -> str:
    """A link of a name that is written to, or a folder that is a link."""
    names = (
        "summary.new",
        "comparison.json",
        "comparison.png",
        "ranks.png",
        "stability.png",
        "model/load.py",
        "records.jsonl",
    )
    saves = ("checkpoint", "checkpoint.writing", "checkpoint.old", "model", "checkpoint/replica")
    name, outside = rng.choice(names + saves), folder.parent / "outside"
    path = folder / name
    if name in names:
        path.unlink(missing_ok=True)
    target = outside / ("marked" if name in names else "linked")
    if path.is_dir():
        shutil.move(path, target)
    if path.parent.is_dir():
        path.symlink_to(target)
    return f"plant {name}"


def _outside(file: Path) -> Path:
    """The folder beside the one of the case."""
    top = next(parent for parent in file.parents if (parent.parent / "outside").is_dir())
    return top.parent / "outside" / "linked"


def wrong_value(file: Path, rng: random.Random) -> None:
    """One value of a JSON file, anywhere in it, is another one."""
    _change(file, rng, lambda holder, key: _put(holder, key, _value(rng, holder)))


def wrong_key(file: Path, rng: random.Random) -> None:
    """A key is missing, or has another name."""

    def change(holder: Any, key: Any) -> None:
        value = holder.pop(key)
        if isinstance(holder, dict) and rng.random() < 0.5:
            holder[rng.choice((*(v for v in VALUES if isinstance(v, str)), f"{key}x"))] = value

    _change(file, rng, change)


def deep(file: Path, rng: random.Random) -> None:
    """Brackets inside brackets, deeper than a parser may recurse."""
    depth = rng.choice((50, 2000, 200_000))
    _change(file, rng, lambda holder, key: _put(holder, key, "@"), '"@"', "[" * depth + "]" * depth)


def twice(file: Path, rng: random.Random) -> None:
    """A key is there twice."""

    def change(holder: Any, key: Any) -> None:
        if isinstance(holder, dict):
            holder[f"{key}@"] = rng.choice(VALUES[:12])

    _change(file, rng, change, '@":', '":')


def wrong_header(file: Path, rng: random.Random) -> None:
    """The header of a safetensors file has another shape, type, place or name, and its values stay."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    if not names or rng.random() < 0.05:
        length = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data)))
        file.write_bytes(struct.pack("<Q", length) + data[8:])
        return
    name = rng.choice(names)
    _change_tensor(header, name, rng.choice(names), rng)
    text = json.dumps(header).encode("utf-8", "replace")
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def _change_tensor(header: dict[str, Any], name: str, other: str, rng: random.Random) -> None:
    about, shape = header[name], header[name]["shape"]
    way = rng.randrange(8)
    if way == 0:
        about["shape"] = list(reversed(shape)) if len(set(shape)) > 1 else [*shape, 1]
    elif way == 1:
        about["shape"] = rng.choice(([2**40], [2**62, 4], [0, 2**62], [-1], [1] * 100, [], [1.5], "x"))
    elif way == 2:  # bytes stay the same
        about["dtype"] = {"F32": "I32", "I64": "F64", "U8": "BOOL"}.get(about["dtype"], "I8")
    elif way == 3:
        about["dtype"] = rng.choice(DTYPES)
    elif way == 4:
        about["data_offsets"] = rng.choice(([0, 2**60], [4, 0], [-1, 3], header[other]["data_offsets"]))
    elif way == 5:
        header[rng.choice(("../../x", "", "0.0.x", "999.0.exp_avg", "-1.0.exp_avg", f"{name}x", "a" * 3000))] = (
            header.pop(name)
        )
    elif way == 6:
        header[name], header[other] = header[other], header[name]
    else:
        del header[name]


def _change(
    file: Path, rng: random.Random, change: Callable[[Any, Any], None], before: str = "", after: str = ""
) -> None:
    """Change a random place in a JSON file, or in one line of several."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    number = rng.randrange(len(lines))
    tree = [json.loads(lines[number])]
    places = list(_places(tree))
    # A place deep in a list of hundreds would be drawn almost always.
    depths = sorted({len(place[0]) for place in places})
    depth = rng.choice(depths)
    _, holder, key = rng.choice([place for place in places if len(place[0]) == depth])
    change(holder, key)
    text = json.dumps(tree[0] if tree else None)
    lines[number] = text.replace(before, after) if before else text
    file.write_text("\n".join(lines) + "\n")


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(pairs):
        yield (*path, key), tree, key
        yield from _places(value, (*path, key))


def _put(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def _value(rng: random.Random, holder: Any) -> Any:
    """A strange value, or one that belongs elsewhere."""
    if rng.random() < 0.2:
        return rng.choice(list(holder.values()) if isinstance(holder, dict) else holder)
    return rng.choice(VALUES)
