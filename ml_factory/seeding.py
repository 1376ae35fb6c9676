"""Seeds derived from names: the same (seed, epoch, step) gives the same numbers on every machine."""

import hashlib

import numpy as np


def derive_seed(*parts: int | str, bits: int = 31) -> int:
    """Return a non-negative integer below 2**bits that depends on the parts alone."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % (1 << bits)


def seeded_generator(*parts: int | str) -> np.random.Generator:
    """Return a NumPy generator for these parts; the global one is never used."""
    return np.random.Generator(np.random.PCG64(derive_seed(*parts, bits=63)))
