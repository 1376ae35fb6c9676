"""Ensembles: out-of-fold predictions and the stack."""
