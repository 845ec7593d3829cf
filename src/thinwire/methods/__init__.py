"""One paper, one file; `base.py` is the contract they all fulfil, `gradients.py` and `averaging.py` the engines."""

from thinwire.methods import ab_paper, allreduce, daso, diloco, local_sgd, oialr, onebit, powersgd, topk

__all__ = ["ab_paper", "allreduce", "daso", "diloco", "local_sgd", "oialr", "onebit", "powersgd", "topk"]
