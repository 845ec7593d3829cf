"""DiLoCo (arXiv 2311.08105), and its streaming variant (arXiv 2501.18512): engine 2, with an outer Nesterov step.

With one group nothing is sent, and the outer steps remain.
"""

from thinwire.config import DiLoCo
from thinwire.methods.averaging import LocalTraining
from thinwire.methods.registry import register


@register("diloco", DiLoCo, example=lambda **more: DiLoCo(warmup=2, every=4, **more))
class DiLoCoMethod(LocalTraining):
    """Groups train alone; outer Nesterov steps by how far they came."""
