"""Checks of trees that were read from a file, before a library reads them: their bytes may come from anywhere."""

from collections.abc import Mapping

import numpy as np

from ml_factory.errors import CheckpointError


def damaged_model(library: str, what: str, got: object, wanted: object = None) -> CheckpointError:
    """Return the error of a model that is not what `library` wrote here."""
    return CheckpointError(
        f"This {library} model is damaged or not one of ours: {what}", got=str(got)[:100], wanted=wanted,
        next_step="train again with fresh=True, or restore the artifact from a copy",
    )  # fmt: skip


def checked_stored_vectors(library: str, stored: object, types: Mapping[str, type]) -> dict[str, np.ndarray]:
    """Return the vectors of these names and types. Raises CheckpointError where one is missing or of another type."""
    arrays = {}
    for name, dtype in types.items():
        value = stored.get(name) if isinstance(stored, Mapping) else None
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            got = f"{getattr(value, 'dtype', type(value).__name__)}, shape {np.shape(value)}"
            raise damaged_model(library, f"its {name}", got, f"a vector of {np.dtype(dtype)}")
        arrays[name] = value
    return arrays
