"""Runs of a workflow: options, status, stored runs, opening, restoring from W&B."""
