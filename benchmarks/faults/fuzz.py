"""Open thousands of damaged and hostile files through every entrance, and see that each is read or refused in words.

    python benchmarks/faults/fuzz.py --cases 5000 --seed 0

Real files come from tiny runs. A case is one of their folders with a file or two changed, and an entrance that reads
it. A finding is any exception but those with a message for users, a warning or error that a user cannot act on, a
case that takes too long or too much memory, and anything that is written, deleted or run outside the folder.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from mutate import mutate, plant
from tiny import Tiny, tiny

import thinwire
from thinwire.base.errors import ThinwireError, is_refusal
from thinwire.checkpoint import saves
from thinwire.cli import main
from thinwire.factor.load_exported import load as load_exported
from thinwire.launch.jobs import method_config
from thinwire.train import fit
from thinwire.train.data import digits

RECIPE = f"{Path(__file__).with_name('tiny.py')}:tiny"
SETTINGS = ("warmup=4", "every=2", "factor_at=6", "cutoff=0.6")
RUN = ["run", RECIPE, "--workers", "1", "--eval-every", "5", "--quiet"]
AB = [*RUN, "--method", "ab", *(word for text in SETTINGS for word in ("--set", text))]
SECONDS = 20.0
MEMORY = 3 << 30
"""Bytes of address space that a case may add to those in use when fuzzing starts."""

SUFFIXES = (".json", ".jsonl", ".safetensors", ".npz", ".gz", ".py", ".pt2")

_RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class", "os.fork")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
# Fonts and compiled files of the libraries themselves, and what tracing writes.
_ALLOWED = (
    "/dev/null",
    "/dev/shm/",
    str(Path.home() / ".cache"),
    str(Path.home() / ".config"),
    f"{tempfile.gettempdir()}/thinwire-result-",
)


class TimeLimit(BaseException):
    """A case takes too long; not an Exception, so that no `except` of the code under test hides it."""


@dataclass
class Finding:
    """A case that ended badly."""

    number: int
    entrance: str
    change: str
    what: str
    trace: str = ""


@dataclass
class Watch:
    """Notes what Python code does outside `inside`. An audit hook cannot be removed, so it is switched off instead."""

    inside: Path | None = None
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in _RUNS_CODE:
            self.seen.append(f"{event} {args[:2]!r}")
        elif event == "open":
            self._note(event, args[:1] if _writes(args) else (), os.path.realpath)
        elif event in _CHANGES:
            self._note(event, tuple(_absolute(path, args[-1]) for path in args[:2]), _in_real_folder)

    def _note(self, event: str, paths: tuple[Any, ...], real: Callable[[str], str]) -> None:
        for path in paths:
            if isinstance(path, str | Path) and not f"{real(str(path))}/".startswith((f"{self.inside}/", *_ALLOWED)):
                self.seen += [f"{event} {path}"] if "__pycache__" not in str(path) else []


def _in_real_folder(path: str) -> str:
    """A link itself can be deleted or replaced; what it leads to stays."""
    return os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))


def _absolute(path: Any, folder: Any) -> Any:
    """`rmtree` names what it deletes by an open folder."""
    is_open = isinstance(path, str) and isinstance(folder, int) and folder > 2 and not os.path.isabs(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if is_open else path


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


WATCH = Watch()
_hooked = False


def _invoke(*words: str) -> None:
    """A command of the command line; raises what it raises, and says what it says when it refuses."""
    result = CliRunner().invoke(main, list(words))
    error = result.exception
    if error is None:
        return
    last = (result.output.strip().splitlines() or [""])[-1]
    if isinstance(error, SystemExit) and (last.startswith("thinwire: ") or "Error: " in last):
        if "\x1b" in last or "\0" in last:
            raise AssertionError(f"control characters in a message: {last!r}")
        raise ThinwireError(last)
    raise error


# The real files.


def _save(folder: Path) -> None:
    replica, optimizer = _attached()
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        loss = replica(torch.randn(8, 1, 8, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    replica.save(folder)


def _attached() -> tuple[thinwire.Replica, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = thinwire.OIALR(total_steps=10, factor_at=3, cutoff=0.6)
    replica = thinwire.attach(model, optimizer, config)
    thinwire.EMA(replica, decay=0.9)
    return replica, optimizer


def _in_groups(folder: Path, whole: Path) -> None:
    """An unfinished run in a group phase of two workers, from one of a single worker."""
    shutil.copytree(whole, folder)
    (save,) = (folder / "checkpoint").glob("step-*")
    for rank in (0, 1):
        for file in [*save.glob("model.*"), *save.glob("method.*"), *save.glob("optimizer.*")]:
            shutil.copy(file, file.with_stem(f"{file.stem}-rank{rank}"))
    for file in save.glob("worker-rank0.*"):
        shutil.copy(file, file.with_stem("worker-rank1"))
    state = json.loads((save / "state.json").read_text())
    state |= {"in_sync": False, "world_size": 2, "groups": [[0], [1]]}
    state["config"]["merge"] = "weighted"
    (save / "state.json").write_text(json.dumps(state))
    names = sorted(path.name for path in save.iterdir() if path.name != saves.MANIFEST)
    saves.write_manifest(save, {name: saves.digest_of(save / name) for name in names})


def _datasets(folder: Path) -> None:
    folder.mkdir()
    for name in ("digits8x8.npz", "tinyshakespeare.txt.gz"):
        shutil.copy(Path(thinwire.__file__).parent / "datasets" / name, folder)


def make_originals(top: Path) -> None:
    """One folder of each kind, by runs of a second or two."""
    _invoke(*AB, "--steps", "14", "--save-every", "10", "--stability", "4", "--out", f"{top}/finished")
    _invoke(*AB, "--steps", "14", "--until", "10", "--out", f"{top}/unfinished")
    many = ["compare", RECIPE, "--workers", "1", "--steps", "8", "--quiet", "--no-model"]
    _invoke(*many, "--methods", "allreduce,oialr,localsgd", "--out", f"{top}/comparison")
    _in_groups(top / "groups", top / "unfinished")
    _save(top / "saved")
    _datasets(top / "data")


# The entrances.


def _fit(folder: Path) -> None:
    config = method_config("ab", SETTINGS, tiny().replace(steps=14).defaults, None)
    fit(tiny().replace(steps=14, eval_every=5), config, out=folder, resume=True, model=False)


def _load(folder: Path) -> None:
    replica, optimizer = _attached()
    replica.load(folder)
    replica(torch.randn(2, 1, 8, 8)).square().mean().backward()
    optimizer.step()


def _load_exported(folder: Path) -> None:
    load_exported(Tiny(), folder / "model")(torch.zeros(2, 1, 8, 8))


def _again(folder: Path, *words: str) -> None:
    _invoke(*AB, "--steps", "14", "--no-model", "--resume", "--out", str(folder), *words)


def _compare(folder: Path) -> None:
    many = ["compare", RECIPE, "--workers", "1", "--steps", "8", "--quiet", "--no-model", "--resume"]
    _invoke(*many, "--methods", "allreduce,oialr,localsgd", "--out", str(folder))


def _export(folder: Path, *words: str) -> None:
    _invoke("export", str(folder), "--recipe", RECIPE, "--out", str(folder / "small"), *words)


def _plan(folder: Path) -> None:
    words = ["--methods", "ab", "--steps", "14", "--compute", "1ms", "--json"]
    _invoke("plan", RECIPE, *words, *(word for text in SETTINGS for word in ("--set", text)), "--ranks", str(folder))


def _text(folder: Path) -> None:
    from thinwire.train.data import unpacked_text

    unpacked_text(folder / "tinyshakespeare.txt.gz")


@dataclass(frozen=True)
class Entrance:
    """A way to read a folder."""

    folder: str
    """The original."""
    read: Callable[[Path], None]
    files: tuple[str, ...]
    """Patterns of the files it reads."""
    weight: int = 4
    """How often it is drawn."""


CHECKPOINT = ("checkpoint/*/*.json", "checkpoint/*/*.safetensors")
ENTRANCES = {
    "replica.load": Entrance("saved", _load, ("*.json", "*.safetensors"), 16),
    "fit(resume=True)": Entrance("unfinished", _fit, (*CHECKPOINT, "records.jsonl"), 14),
    "run --resume": Entrance("unfinished", _again, (*CHECKPOINT, "records.jsonl"), 6),
    "run --resume, finished": Entrance("finished", _again, ("summary.json",), 5),
    "report": Entrance("comparison", lambda f: _invoke("report", str(f)), ("*/summary.json", "*/records.jsonl"), 3),
    "report --json": Entrance(
        "finished", lambda f: _invoke("report", str(f), "--json"), ("summary.json", "records.jsonl"), 3
    ),
    "compare --resume": Entrance("comparison", _compare, ("*/summary.json", "*/records.jsonl"), 2),
    "export": Entrance("finished", _export, ("summary.json", "model/*"), 3),
    "export --rank": Entrance("finished", lambda f: _export(f, "--rank", "2"), ("summary.json", "model/*"), 2),
    "export, unfinished": Entrance("unfinished", _export, CHECKPOINT, 3),
    "export, in groups": Entrance("groups", _export, CHECKPOINT, 2),
    "load.py": Entrance("finished", _load_exported, ("model/*.json", "model/*.safetensors"), 12),
    "stability": Entrance(
        "finished",
        lambda f: _invoke("stability", f"{f}/model", f"{f}/checkpoint"),
        ("model/*.json", "model/*.safetensors", "checkpoint/*/model.safetensors"),
    ),
    "plan --ranks": Entrance("finished", _plan, ("summary.json", "records.jsonl"), 4),
    "digits": Entrance("data", lambda f: digits(f) and None, ("*.npz",), 3),
    "text": Entrance("data", _text, ("*.gz",), 3),
}


# A case.


def _sign(file: Path) -> None:
    """Checksums find what was damaged; who changes a save on purpose makes them anew."""
    whole = all(other.is_file() and other.stat().st_size < 1 << 24 for other in file.parent.iterdir())
    if whole and (file.parent / saves.MANIFEST).is_file() and file.name != saves.MANIFEST and file.is_file():
        with contextlib.suppress(OSError, ThinwireError):  # the manifest or a file may be one no more
            saves.sign(file.parent)


def entrance_of(number: int, seed: int) -> str:
    """The entrance of a case."""
    weights = [entrance.weight for entrance in ENTRANCES.values()]
    return random.Random(f"{seed} {number} entrance").choices(list(ENTRANCES), weights)[0]


def one_case(number: int, seed: int, originals: Path, work: Path) -> tuple[str, Finding | None]:
    """The outcome, "opened", "refused" or "finding", of one case; the same for the same number and seed."""
    name, rng = entrance_of(number, seed), random.Random(f"{seed} {number}")
    entrance = ENTRANCES[name]
    place = work / f"case{number}"
    shutil.rmtree(place, ignore_errors=True)
    folder, outside = place / "folder", place / "outside"
    shutil.copytree(originals / entrance.folder, folder)
    outside.mkdir()
    (outside / "marked").write_text("not to be touched")
    files = sorted(file for pattern in entrance.files for file in folder.glob(pattern) if file.suffix in SUFFIXES)
    changes = [plant(folder, rng)] if rng.random() < 0.06 else []
    for file in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2)))) if not changes else ():
        changes.append(f"{mutate(file, rng)} {file.relative_to(folder)}")
        if rng.random() < 0.9:
            _sign(file)
    before = _digest(outside)
    outcome, what, trace = _watched(lambda: entrance.read(folder), folder)
    if WATCH.seen:
        outcome, what = "finding", f"outside the folder: {WATCH.seen[0]}"
    elif _digest(outside) != before or sorted(p.name for p in place.iterdir()) != ["folder", "outside"]:
        outcome, what = "finding", "something outside the folder was changed"
    shutil.rmtree(place, ignore_errors=True)
    found = Finding(number, name, "; ".join(changes), what, trace) if outcome == "finding" else None
    return outcome, found


def _digest(folder: Path) -> str:
    content = [(str(p), p.read_bytes() if p.is_file() else b"") for p in sorted(folder.rglob("*"))]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _watched(read: Callable[[], None], folder: Path) -> tuple[str, str, str]:
    WATCH.seen, WATCH.inside = [], Path(os.path.realpath(folder))
    try:
        with _time_limit(), warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(nowhere):
                read()
        return "opened", "", ""
    except ThinwireError as error:
        return ("refused", str(error), "") if str(error).strip() else ("finding", "no message", traceback.format_exc())
    except ValueError as error:
        # What load.py raises, which has no Thinwire: its own sentence, not one of Python's.
        own = traceback.extract_tb(error.__traceback__)[-1].filename.endswith("load_exported.py")
        return ("refused", str(error), "") if own else ("finding", _name(error), traceback.format_exc())
    except TimeLimit:
        return "finding", f"took longer than {SECONDS:.0f} s", traceback.format_exc()
    except Exception as error:
        return ("refused", str(error), "") if is_refusal(error) else ("finding", _name(error), traceback.format_exc())
    finally:
        WATCH.inside = None


def _name(error: BaseException) -> str:
    """The error and the last line of Thinwire's own that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/thinwire/" in f.filename]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}{where}"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """An allocation far beyond what the files need fails, as a MemoryError or a RuntimeError of torch."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(
    numbers: Iterable[int], seed: int, originals: Path, on_finding: Callable[[Finding], None] = lambda found: None
) -> tuple[Counter[str], list[Finding]]:
    """Outcomes by name, and the findings."""
    global _hooked
    if not _hooked:
        sys.addaudithook(WATCH)
        _hooked = True
    outcomes: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory() as work, limited_memory():
        for number in numbers:
            outcome, found = one_case(number, seed, originals, Path(work))
            outcomes[outcome] += 1
            if found is not None:
                findings.append(found)
                on_finding(found)
    return outcomes, findings


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first case's number, to repeat one or to go on")
    parser.add_argument("--json", type=Path, help="write outcomes and findings here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as top:
        make_originals(Path(top))
        print(f"originals after {time.monotonic() - began:.0f} s", flush=True)
        numbers = range(given.start, given.start + given.cases)
        outcomes, findings = fuzz(numbers, given.seed, Path(top), _print)
    kinds = Counter(found.what for found in findings)
    for what, count in kinds.most_common():
        print(f"{count:5} {what}")
    print(f"{given.cases} cases in {time.monotonic() - began:.0f} s: {dict(outcomes)}")
    if given.json:
        given.json.write_text(json.dumps({"outcomes": outcomes, "findings": [vars(f) for f in findings]}, indent=1))
    sys.exit(bool(findings))


def _print(found: Finding) -> None:
    print(f"case {found.number}, {found.entrance}, {found.change}: {found.what}", flush=True)


if __name__ == "__main__":
    _main()
