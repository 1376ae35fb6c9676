"""A bundle that predicts."""
