"""Tables and plots from run folders. Imports nothing from training."""

from thinwire.report.comparison import compare
from thinwire.report.plots import draw
from thinwire.report.runs import Run, read_run, read_runs
from thinwire.report.tables import table

__all__ = ["Run", "compare", "draw", "read_run", "read_runs", "table"]
