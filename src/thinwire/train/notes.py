"""What rank 0 records besides evaluations and ranks, so that a run can be followed while it goes on."""

from __future__ import annotations

import time
from typing import Any

from thinwire.train.run import Run
from thinwire.train.summary import describe_optimizers

FINISHING = "finishing"
"""The phase after the last step, in records of work."""
_EVERY_S = 1.0


def note_start(run: Run) -> None:
    """Record what is trained from here on; again when the run is resumed."""
    replica, recipe = run.replica, run.recipe
    about = replica.describe()
    run.recorder.write(
        "start",
        step=replica.step,
        recipe=recipe.name,
        seed=run.identity["seed"],
        **{name: about[name] for name in ("method", "config", "parameters_full")},
        **describe_optimizers(recipe),
        steps=recipe.steps,
        batch=recipe.batch,
        metric=recipe.task.metric,
        split=recipe.split,
        split_size=run.batcher.source.heldout_size,
        world_size=replica.topology.world_size,
        # All-reduce sends the same at every step, so these two give what it would have sent at any of them.
        usual_bytes=replica.baseline()["allreduce_fp32"],
        usual_bytes_at_end=replica.baseline(recipe.steps)["allreduce_fp32"],
        **so_far(run),
    )


def note_work(run: Run, what: str, done: int = 0, of: int | None = None) -> None:
    """Record work that is no step and may take long: its beginning, and once a second how far it is."""
    now = time.monotonic()
    if done and now - run.noted < _EVERY_S:
        return
    run.noted = now
    phase = run.replica.phase if run.spent.in_steps else FINISHING
    far = {} if of is None else {"done": done, "of": of}
    run.recorder.write("work", step=run.replica.step, phase=phase, what=what, **far, wall_s=round(run.wall_s, 3))


def so_far(run: Run) -> dict[str, Any]:
    """Bytes, and seconds of waiting and in all, for a record."""
    traffic = run.replica.traffic
    return {
        "slow_bytes": traffic.slow_bytes,
        "evaluate_bytes": traffic.slow_bytes_for("evaluate"),
        "fast_bytes": traffic.fast_bytes,
        "wire_s": round(traffic.waiting, 4),
        "wall_s": round(run.wall_s, 3),
    }
