"""Colab and its stand-ins; importable from a checkout only."""
