"""AB among four workers reaches all-reduce's accuracy with a fraction of its bytes, from the command line."""

import json
import subprocess
import sys
from pathlib import Path


def test_ab_keeps_up_with_all_reduce_on_digits(tmp_path: Path) -> None:
    """One seed, so the margin is 3 points: 16 of 540 digits. `benchmarks/README.md` has five seeds."""
    flags = ["--methods", "allreduce,ab", "--workers", "4", "--group-size", "2", "--seeds", "1", "--quiet"]
    command = [sys.executable, "-m", "thinwire", "compare", "digits", *flags, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads((tmp_path / "comparison.json").read_text())}
    usual, ab = rows["allreduce"], rows["ab"]
    assert usual["accuracy_mean"] > 0.97
    assert ab["accuracy_mean"] >= usual["accuracy_mean"] - 0.03
    assert ab["traffic_vs_allreduce_fp32"] <= 0.40 < 0.99 <= usual["traffic_vs_allreduce_fp32"] <= 1.0
    assert ab["compression_mean"] > 1.2
    measured = [json.loads((tmp_path / f"{m}-seed0" / "summary.json").read_text()) for m in ("allreduce", "ab")]
    sent = [run["traffic"]["slow_bytes"] - _of_evaluation(run) for run in measured]
    assert ab["traffic_vs_allreduce_fp32"] == sent[1] / sent[0]
    # What a lone AB run reckons all-reduce would have sent is what all-reduce did send, but for checksums and control.
    assert abs(measured[1]["traffic_vs_allreduce_fp32"] / ab["traffic_vs_allreduce_fp32"] - 1) < 1e-4
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


def _of_evaluation(run: dict) -> int:
    return run["traffic"]["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)
