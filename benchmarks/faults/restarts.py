"""Runs that are killed again and again and resumed from their last save: is the result that of an unbroken run?

    python benchmarks/faults/restarts.py --methods ab,diloco --kills 10 --out OUT

`thinwire run digits` on four workers. At random steps either everything is killed with SIGKILL or one worker, whose
launcher then has to end the others. A row has the kills, whether the finished model is bit-identical to that of the
unbroken run, processes that were left behind, and the steps that had to be trained again, as a share of all.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch import print_rows

from thinwire.checkpoint import saves
from thinwire.methods.registry import METHODS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def one(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """A run that is never killed, and one that is."""
    whole, broken = given.out / f"{method}-whole", given.out / f"{method}-broken"
    for folder in (whole, broken):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    _start(method, whole, given, resume=False).wait()
    rng, kills, trained, left = random.Random(f"{given.seed} {method}"), {"all": 0, "a worker": 0}, 0, 0
    for number in range(given.kills + 1):
        saved = saves.find(broken / "checkpoint")
        begin = int(saved.name.rpartition("-")[2]) if saved else 0
        process = _start(method, broken, given, resume=saved is not None)
        if number == given.kills:
            process.wait()
        else:
            at = begin + rng.randint(1, max(1, 2 * (given.steps - begin) // (given.kills - number + 1)))
            while process.poll() is None and _last_step(broken) < min(at, given.steps - 2):
                time.sleep(0.02)
            kind = rng.choice(list(kills))
            kills[kind] += _kill(broken, kind)
            process.wait()
        trained += max(0, _last_step(broken) - begin)
        left += _left_behind(broken)
    same = _digest(whole) is not None and _digest(whole) == _digest(broken)
    again = round(max(0, trained - given.steps) / given.steps, 3)
    return {"method": method, "kills": kills, "identical": same, "left behind": left, "trained again": again}


def _start(method: str, folder: Path, given: argparse.Namespace, *, resume: bool) -> subprocess.Popen[bytes]:
    words = ["run", "digits", "--method", method, "--workers", "4", "--steps", str(given.steps), "--out", str(folder)]
    words += ["--save-every", str(given.save_every), "--quiet", "--resume" if resume else "--overwrite"]
    with (folder.parent / f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "thinwire.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def _kill(folder: Path, kind: str) -> bool:
    """Whether there was anything to kill."""
    everyone = _processes(folder)
    workers = [pid for pid, command in everyone.items() if "-m\0thinwire\0" in command and ".run\0" not in command]
    for pid in everyone if kind == "all" else workers[-1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(workers)


def _processes(folder: Path) -> dict[int, str]:
    """The launchers and workers that write to this folder, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"--out\0{folder}\0" in (command := (entry / "cmdline").read_text()):
                found[int(entry.name)] = command
    return found


def _left_behind(folder: Path) -> int:
    """Processes that are still there ten seconds later; they are killed."""
    end = time.monotonic() + 10
    while (found := _processes(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def _last_step(folder: Path) -> int:
    """The last step in the records."""
    path = folder / "records.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return int(json.loads(line)["step"])
    return 0


def _digest(folder: Path) -> str | None:
    """Of the finished model's files; None if there is none."""
    found = hashlib.blake2b(digest_size=8)
    paths = sorted((folder / "model").glob("*.safetensors"))
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest() if paths else None


if __name__ == "__main__":
    print_rows(one, arguments())
