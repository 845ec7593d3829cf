"""One paper, one file: a method's settings, and the phases that they make a run of; `runner.py` walks them."""

from thinwire.methods.ab import AB
from thinwire.methods.ab_paper import PaperAB
from thinwire.methods.allreduce import AllReduce
from thinwire.methods.daso import DASO
from thinwire.methods.diloco import DiLoCo
from thinwire.methods.local_sgd import LocalSGD
from thinwire.methods.oialr import OIALR
from thinwire.methods.onebit import OneBit
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.topk import TopK

__all__ = ["AB", "DASO", "OIALR", "AllReduce", "DiLoCo", "LocalSGD", "OneBit", "PaperAB", "PowerSGD", "TopK"]
