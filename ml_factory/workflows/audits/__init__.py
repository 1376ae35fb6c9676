"""Audit of what a pipeline stores, trains and predicts."""
