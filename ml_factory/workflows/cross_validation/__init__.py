"""Folds of a cross-validation: their schemes, fits and scores."""
