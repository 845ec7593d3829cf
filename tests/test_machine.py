"""Which warnings fail a test, here and in workers, and what tests do not see of where they are started."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gang
import small

BLAS = (
    "mkldnn_matmul failed, switching to BLAS gemm:could not create a primitive descriptor for a matmul primitive "
    "(Triggered internally at /pytorch/aten/src/ATen/native/LinearAlgebra.cpp:1487.)"
)
OF_THE_MACHINE = [BLAS, BLAS.replace(": ", ":\n"), "Can't initialize NVML", "The value of the smallest subnormal is 0."]
OURS = [
    ("keep pattern 'no' matches no layer", UserWarning),
    ("torch.thing is deprecated", DeprecationWarning),
    ("this is going away", FutureWarning),
    ("unclosed file", ResourceWarning),
    ("torch.thing is deprecated (Triggered internally at /pytorch/torch/csrc/thing.cpp:1.)", UserWarning),
    (
        "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed. (Triggered internally at x)",
        UserWarning,
    ),
]


def passed_over() -> bool:
    """Warnings about the machine, one of them by torch itself, which says it once in a process."""
    for text in OF_THE_MACHINE:
        warnings.warn(text, stacklevel=2)
    F.conv2d(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 2, 2), padding="same")
    return True


def raised() -> list[str]:
    """Those of OURS that end a test."""
    found = []
    for text, category in OURS:
        try:
            warnings.warn(text, category, stacklevel=2)
        except category as error:
            found.append(str(error))
    return found


def both(rank: int) -> tuple[bool, list[str]]:
    small.strict()
    return passed_over(), raised()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_the_machines_warnings_pass_and_ours_do_not() -> None:
    assert raised() == [text for text, _ in OURS]
    [(passed, found)] = gang.run(both, 1)
    assert passed and found == raised()


TEST = """
import test_machine

def test_it():
    assert test_machine.passed_over()
"""


@pytest.mark.slow
def test_a_test_with_such_a_warning_passes_and_shows_it(tmp_path) -> None:
    """As pytest runs it, with this project's settings, started by a job of two that has a GPU."""
    here = Path(__file__).parent
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "conftest.py").write_text((here / "conftest.py").read_text())
    job = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "FORCE_COLOR": "1", "PYTHONWARNINGS": "error"}
    words = [sys.executable, "-m", "pytest", "-c", str(here.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
    found = subprocess.run(
        [*words, "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, **job, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "1 passed" in found.stdout and "mkldnn_matmul failed" in found.stdout
