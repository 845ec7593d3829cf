"""Whether the workers of a run read the same data.

With one more example on one node, its workers would use another order: some examples would be trained on twice,
others never, without any error.
"""

from __future__ import annotations

import numpy as np

from thinwire.comm.buckets import checksum
from thinwire.comm.wire import Wire
from thinwire.replica.preflight import check_same_data
from thinwire.train.data import Source
from thinwire.train.step_rng import StepRNG

_PARTS = {"train": "to train on", "validation": "to validate on", "heldout": "held out"}


def compare(source: Source, wire: Wire) -> None:
    """Refuse data that differs in the number of examples, or in the first, the middle or the last; collective."""
    if wire.topology.world_size > 1:
        check_same_data(_description(source), wire)


def _description(source: Source) -> list[str]:
    sizes = {part: getattr(source, f"{part}_size", 0) for part in _PARTS}
    lines = [f"{size:,} examples {_PARTS[part]}" for part, size in sizes.items()]
    if hasattr(source, "fingerprint"):
        return [*lines, f"files of fingerprint {source.fingerprint()}"]
    return [*lines, *(_examples(source, part, size) for part, size in sizes.items() if size)]


def _examples(source: Source, part: str, size: int) -> str:
    rows = np.unique([0, size // 2, size - 1])
    rng = (StepRNG(0, 0, batch=len(rows)),) if part == "train" else ()
    held = [t.cpu() for t in getattr(source, part)(rows, *rng)]
    return f"examples {', '.join(map(str, rows))} {_PARTS[part]} of checksum {checksum(held):x}"
