"""Verbs of the command line; heavy libraries are imported only when a verb's work begins."""
