"""Trainings of other fields on the same loop: each adds data, a network and a loss, and nothing else."""

from ml_factory.recipes.torchvision_operators import declare_missing_operators

# Before any file here, or transformers, imports torchvision.
declare_missing_operators()
