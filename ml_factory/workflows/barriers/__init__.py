"""Searched label barriers: trials and what they found."""
