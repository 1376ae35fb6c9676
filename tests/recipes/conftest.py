"""Recipes' tests: torchvision's operators are declared before any test file imports transformers or torchvision."""

import ml_factory.recipes  # noqa: F401
