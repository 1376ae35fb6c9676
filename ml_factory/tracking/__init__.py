"""Tracking of runs: the run's log, its upload to the workspace, and Weights & Biases as a mirror."""
