"""Where a run's numbers go besides records.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow, or your function.

A logger is a function of one argument, a record: a dict with its `kind`. The first is "begin", the last is "end".
"""

from thinwire.loggers.log import NAMES, Log, Logger, Loggers, chosen
from thinwire.loggers.trackers import MLflow, TensorBoard, Tracker, Trackio, WandB

__all__ = ["NAMES", "Log", "Logger", "Loggers", "MLflow", "TensorBoard", "Tracker", "Trackio", "WandB", "chosen"]
