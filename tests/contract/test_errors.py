"""Errors: what failed outside a file is not called damage of the file."""

import errno

import pytest

from ml_factory.errors import CheckpointError, WorkspaceError, refuse_damaged_content


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (KeyError("micro"), CheckpointError, "is damaged.*micro.*Next: start a new run"),
        (OSError("Couldn't deserialize thrift"), CheckpointError, "is damaged"),
        (MemoryError(), WorkspaceError, "more memory.*Next: close other programs"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), WorkspaceError, "more memory.*2.00 GiB"),
        (OSError(errno.EIO, "Input/output error"), WorkspaceError, "could not be read.*Next: check that its disk"),
    ],
    ids=["field", "content", "memory", "gpu", "disk"],
)
def test_refuse_damaged_content_tells_damage_from_memory_and_disk(error, kind, words):
    with (
        pytest.raises(kind, match=words),
        refuse_damaged_content(CheckpointError, "It is damaged", next_step="start a new run"),
    ):
        raise error
