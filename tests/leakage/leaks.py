"""Every way we know of to spoil the clean pipeline: each leak is the clean one with one thing done wrong."""

from tests.leakage import leaky_columns, leaky_parts
from tests.leakage.catalogue import CATALOGUE, Leak, Learning, bars_with_events, clean_pipeline, measured

MODULES = (leaky_columns, leaky_parts)  # their leaks entered the catalogue when they were read

__all__ = ["CATALOGUE", "MODULES", "Leak", "Learning", "bars_with_events", "clean_pipeline", "measured"]
