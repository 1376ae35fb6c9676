"""Text, tokenizers, packed sequences and causal models, shared by the recipes of language models."""
