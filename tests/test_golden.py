"""Trajectories of every method, as they were: a refactoring keeps them.

Each file in `golden/` holds losses, norms of the parameters and bytes of one method in two layouts. CPUs round
differently, so values are compared within a tolerance. `pytest --golden=bits` also compares digests of all bits, which
only holds on the machine and the version of torch that wrote them; `pytest --golden=write` rewrites the files.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from trajectories import CASES, LAYOUTS, trajectories

FOLDER = Path(__file__).parent / "golden"


def found(name: str) -> dict[str, list[dict[str, Any]]]:
    """Of the first and the last worker, by layout."""
    return {
        layout: [_golden(trajectories(layout)[rank][name]) for rank in (0, workers - 1)]
        for layout, (workers, _) in LAYOUTS.items()
    }


def _golden(seen: dict[str, Any]) -> dict[str, Any]:
    bits = "".join((*seen["parameters"], *seen["buffers"], *seen["state"]))
    few = {name: [float(f"{value:.7g}") for value in seen[name]] for name in ("losses", "norms")}
    return few | {"bits": hashlib.sha256(bits.encode()).hexdigest()[:16], "slow_bytes": seen["slow_bytes"]}


@pytest.mark.parametrize("name", CASES)
def test_a_trajectory_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    file, mode = FOLDER / f"{name.replace(' ', '-')}.json", request.config.getoption("--golden")
    now = found(name)
    if mode == "write":
        rows = {layout: ",\n  ".join(map(json.dumps, own)) for layout, own in now.items()}
        file.write_text("{\n" + ",\n".join(f' "{layout}": [\n  {own}\n ]' for layout, own in rows.items()) + "\n}\n")
    for layout, workers in json.loads(file.read_text()).items():
        for mine, golden in zip(now[layout], workers, strict=True):
            assert mine["slow_bytes"] == golden["slow_bytes"]
            assert mine["losses"] == pytest.approx(golden["losses"], rel=2e-3)
            assert mine["norms"] == pytest.approx(golden["norms"], rel=1e-3)
            assert mode != "bits" or mine["bits"] == golden["bits"]
