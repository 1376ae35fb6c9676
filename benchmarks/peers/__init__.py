"""The benchmarks' other sides: the same numbers, made with the best public packages."""
