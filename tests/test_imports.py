"""What importing Thinwire loads beyond torch: modules are counted, since times depend on the machine."""

import json
import subprocess
import sys

import pytest

HEAVY = {
    *("accelerate", "IPython", "matplotlib", "networkx", "numpy.testing", "onnx", "onnxruntime", "onnxscript"),
    *("pandas", "PIL", "scipy", "sklearn", "sympy", "tensorboard", "torchvision", "transformers", "triton"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.elastic", "torch.distributed.fsdp", "torch.onnx"),
    *("torch.distributed.tensor", "torch.testing._internal", "torch.utils.tensorboard"),
}
COMMAND_LINE = {"click", "rich", "thinwire.cli", "thinwire.netbench", "thinwire.plan", "thinwire.recipes"}
# The command line loads the package first, so one process shows both.
SCRIPT = """
import importlib, json, sys, torch
before, found = set(sys.modules), {}
for name in ("thinwire", "thinwire.cli"):
    importlib.import_module(name)
    found[name] = sorted(set(sys.modules) - before)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("module", "unwanted"), [("thinwire", HEAVY | COMMAND_LINE), ("thinwire.cli", HEAVY)])
def test_nothing_heavy_is_loaded_before_it_is_used(module, unwanted, found):
    loaded = found[module]
    assert module in loaded and not unwanted & set(loaded)
    assert sum(not name.startswith(("thinwire", "click", "rich")) for name in loaded) < 40
