"""Inference: the bundle and its batch predictions."""
