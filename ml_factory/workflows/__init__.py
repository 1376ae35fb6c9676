"""Workflows: one file a verb of the pipeline, and what the verbs share."""
