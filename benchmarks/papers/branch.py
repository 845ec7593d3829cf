"""The save of a run in its warm-up, as that of another method that has done the same so far.

Until its first decomposition AB is all-reduce, bit for bit. So runs of all-reduce, of AB with groups and of AB without
them share their first steps, and what they differ by is the method's own doing.
"""

import json
import shutil
from pathlib import Path

from thinwire.base.errors import ConfigError
from thinwire.checkpoint import saves
from thinwire.config.settings import describe
from thinwire.launch.jobs import Job
from thinwire.train import checkpoint

_COMMON = ("step", "events", "decompositions", "found_ranks", "gradients")
"""What the state of every method has."""


def branch(saved: Path, job: Job) -> int:
    """Copy a checkpoint into the job's folder, under the job's name; returns the step it stands at."""
    shutil.rmtree(job.out / "checkpoint", ignore_errors=True)
    last = saves.find_sound(saved)
    place = job.out / "checkpoint" / last.name
    shutil.copytree(last, place)
    position = json.loads((place / "position.json").read_text())
    position["identity"] = _plain(checkpoint.identity(job.trained, job.config, job.seed))
    (place / "position.json").write_text(json.dumps(position))
    file = place / "state.json"
    state = json.loads(file.read_text())
    if state["method_name"] != "ab-paper" or state["method"]["phase"] != "warmup":
        raise ConfigError(f"{saved} is of {state['method_name']} in phase {state['method']['phase']}, not AB's warm-up")
    state |= {"method_name": job.method, "config": _plain(describe(job.config))}
    if job.method == "allreduce":
        state["method"] = {name: state["method"][name] for name in _COMMON} | {"phase": "train"}
    file.write_text(json.dumps(state))
    saves.sign(place)
    (job.out / "summary.json").unlink(missing_ok=True)  # of an earlier run, which `--resume` would take for this one
    shutil.copy(saved.parent / "records.jsonl", job.out / "records.jsonl")
    return position["step"]


def _plain(values: object) -> object:
    return json.loads(json.dumps(values))
