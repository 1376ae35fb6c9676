"""Numbers ready to learn from."""
