"""What a method of one's own is made of; docs/extending.md shows a whole one.

Such a method has what every method has: plans, saves, `faults=`, `join()`, sharded models, loggers and reports. One
that cannot have something says so in `Method.refuses`.
"""

from thinwire.base.checks import check_choice, check_share, check_whole
from thinwire.comm.buckets import pack_wide, unpack_into
from thinwire.comm.fsdp import local, whole_of
from thinwire.comm.wire import Pending, Wire
from thinwire.config.common import Averaged, Config, Scheduled, Warmed
from thinwire.methods.averaged import AveragedTensors
from thinwire.methods.averaging import LocalTraining
from thinwire.methods.base import Method
from thinwire.methods.coding import CodedGradients
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.diverged import refuse_diverged
from thinwire.methods.features import Feature
from thinwire.methods.merging import average, average_buffers, average_model, average_moments, restored
from thinwire.methods.registry import register

__all__ = [
    "Averaged",
    "AveragedTensors",
    "CodedGradients",
    "Config",
    "Feature",
    "LocalTraining",
    "Method",
    "MethodContext",
    "Pending",
    "Saved",
    "Scheduled",
    "Warmed",
    "Wire",
    "average",
    "average_buffers",
    "average_model",
    "average_moments",
    "check_choice",
    "check_share",
    "check_whole",
    "local",
    "pack_wide",
    "refuse_diverged",
    "register",
    "restored",
    "unpack_into",
    "whole_of",
]
