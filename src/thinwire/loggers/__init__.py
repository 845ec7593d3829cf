"""Where a run's numbers go besides records.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow, or your function.

A logger is a function of one argument, a record: a dict with its `kind`. The first is "begin", the last is "end".
"""

from thinwire.loggers.choice import NAMES, chosen
from thinwire.loggers.fanout import Logger, Loggers
from thinwire.loggers.own_loop import Log
from thinwire.loggers.to_mlflow import MLflow
from thinwire.loggers.to_tensorboard import TensorBoard
from thinwire.loggers.to_trackio import Trackio
from thinwire.loggers.to_wandb import WandB
from thinwire.loggers.tracker import Tracker

__all__ = ["NAMES", "Log", "Logger", "Loggers", "MLflow", "TensorBoard", "Tracker", "Trackio", "WandB", "chosen"]
