"""Run tracking: a JSONL log of each run in the workspace, mirrored to W&B."""
