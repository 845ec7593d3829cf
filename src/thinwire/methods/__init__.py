"""One paper, one file; `base.py` is the contract they all fulfil, `gradients.py` and `averaging.py` the engines."""

from thinwire.methods import ab, ab_paper, allreduce, daso, diloco, local_sgd, oialr, onebit, powersgd, topk

__all__ = ["ab", "ab_paper", "allreduce", "daso", "diloco", "local_sgd", "oialr", "onebit", "powersgd", "topk"]
