"""Features: columns computed from past bars only."""
