"""Run folders, read back: rows, tables and pictures. Imports nothing of training."""

from thinwire.report.plots import draw
from thinwire.report.records import Run, compare, read_run, read_runs
from thinwire.report.tables import table

__all__ = ["Run", "compare", "draw", "read_run", "read_runs", "table"]
