"""Local SGD (arXiv 1805.09767; with a warm-up, post-local SGD, arXiv 1808.07217): engine 2, and the mean is taken."""

from thinwire.config import LocalSGD
from thinwire.methods.averaging import LocalTraining
from thinwire.methods.registry import register


@register("localsgd", LocalSGD, example=lambda **more: LocalSGD(warmup=2, every=4, **more))
class LocalSGDMethod(LocalTraining):
    """Groups train alone and average parameters every so often."""
