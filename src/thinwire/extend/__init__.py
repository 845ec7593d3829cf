"""What a method of one's own is made of; docs/extending.md shows a whole one.

Such a method has what every method has: plans, saves, `faults=`, `join()`, sharded models, loggers and reports. A part
that cannot have something says so in `refuses`.
"""

from thinwire.base.checks import check_choice, check_share, check_whole
from thinwire.base.errors import ConfigError
from thinwire.comm.buckets import pack_wide, unpack_into
from thinwire.comm.fsdp import local, whole_of
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Pending, Wire
from thinwire.config.common import Averaged, Config, Nesterov, Radial, Scheduled, Warmed
from thinwire.exchange.averaged import AveragedTensors, all_restored
from thinwire.exchange.diverged import refuse_diverged
from thinwire.exchange.gradients import Gradients
from thinwire.exchange.merging import average, average_buffers, average_model, average_moments, restored
from thinwire.exchange.parameters import Parameters
from thinwire.exchange.parts import Cycle, Every, Exchange, Feature, PartState, Run, Schedule, UpdateRule
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase, warmed_up
from thinwire.shape.shape import Shape

__all__ = [
    "Averaged",
    "AveragedTensors",
    "Config",
    "ConfigError",
    "Cycle",
    "Every",
    "Exchange",
    "Feature",
    "Gradients",
    "Nesterov",
    "Parameters",
    "PartState",
    "Pending",
    "Phase",
    "Radial",
    "Run",
    "Schedule",
    "Scheduled",
    "Shape",
    "Topology",
    "UpdateRule",
    "Warmed",
    "Wire",
    "all_restored",
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
    "warmed_up",
    "whole_of",
]
