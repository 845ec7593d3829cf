"""Searches for the settings of runs: each trial is a run of its own, judged on validation data."""
