"""Several models, one answer."""
