"""Smaller networks from trained ones: pruned, quantized, distilled."""
