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
SCRIPT = """
import json, sys, torch
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize(("module", "unwanted"), [("thinwire", HEAVY | COMMAND_LINE), ("thinwire.cli", HEAVY)])
def test_nothing_heavy_is_loaded_before_it_is_used(module, unwanted):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout)
    assert module in loaded and not unwanted & set(loaded)
    assert sum(not name.startswith(("thinwire", "click", "rich")) for name in loaded) < 40
