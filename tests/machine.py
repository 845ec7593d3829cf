"""What a test must not depend on: the machine's say in its warnings and in its environment."""

import os

# Later ones come first. The kernels of torch, which say where in C++ they were triggered, mostly speak about the
# machine: a CPU without bf16, a library that is missing, a fallback. They are shown. Where they speak about how they
# were called, that is our business, as is every warning from Python, ours and deprecations above all.
FILTERS = [
    ("default", r"(?s).*\(Triggered internally at", UserWarning),
    ("default", r"(?s).*(NVML|CUDA initialization|CUDA driver)", UserWarning),
    ("default", r".*smallest subnormal", UserWarning),
    ("error", r"(?s).*(deprecat|not a leaf Tensor).*\(Triggered internally at", UserWarning),
]
_FROM_A_JOB = ("SLURM_", "PMI_", "TORCHELASTIC_", "THINWIRE_", "NCCL_")
_OURS = {"THINWIRE_SWEEP", "THINWIRE_REQUIRE_ALL", "THINWIRE_TEST_DEVICE", "THINWIRE_FEATURES"}
"""What is said to the tests themselves."""
_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "PYTHONWARNINGS"),
}


def lines() -> list[str]:
    """The filters as pytest writes them."""
    return [f"{action}:{message}:{category.__name__}" for action, message, category in FILTERS]


def forget_surroundings() -> None:
    """Tests are no workers of the job that starts them, write to no terminal, and compute on the CPU by default."""
    on_gpu = os.environ.get("THINWIRE_TEST_DEVICE", "cpu") != "cpu"
    strange = [name for name in os.environ if name in _NAMES or name.startswith(_FROM_A_JOB)]
    for name in set(strange) - _OURS:
        if not (on_gpu and name.startswith("NCCL_")):
            del os.environ[name]
    if not on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
