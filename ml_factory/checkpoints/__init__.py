"""Checkpoints: save states on a schedule, verify them, resume from the newest one on any machine."""
