"""Preprocessing bar by bar gives the bits of the batch, also for the steps that remember closes."""

import numpy as np
import pytest

from ml_factory.datasets.fitted_transforms import FractionalDifferenceTransform, PcaTransform, TwoStateHmmTransform
from ml_factory.datasets.preprocessing import Preprocessor
from ml_factory.datasets.preprocessing_stream import PreprocessingStream
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.storage.serialization import deserialize_state, serialize_state


def fitted_steps() -> Preprocessor:
    """Every kind of step that reads closes, and one that mixes columns."""
    hmm = TwoStateHmmTransform(np.array([0.0, 1e-3]), np.array([1e-3, 4e-3]), np.array([0.95, 0.9]))
    pca = PcaTransform(np.zeros(5), np.ones(5), np.random.default_rng(1).normal(size=(5, 3)))
    return Preprocessor(
        (
            FractionalDifferenceTransform(0.4, window=20),
            hmm,
            pca,
            RobustScaler.fit(np.random.default_rng(2).normal(size=(50, 3)).astype(np.float32)),
        )
    )


@pytest.mark.parametrize("sizes", [[1], [7], [0, 3, 1], [300]])
def test_preprocessing_stream_in_chunks_and_restored_equals_batch(sizes):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 3)).astype(np.float32)
    close = 100 * np.exp(np.cumsum(generator.normal(0, 2e-3, 300)))
    fitted = fitted_steps()
    stream, at, parts = PreprocessingStream(fitted), 0, []
    while at < len(x):
        size = sizes[len(parts) % len(sizes)]
        parts.append(stream.push(x[at : at + size], close[at : at + size]))
        state = deserialize_state(serialize_state(stream.get_state()))
        stream, at = PreprocessingStream(fitted), at + size
        stream.load_state(state)
    wanted = fitted.transform(x, close)
    np.testing.assert_array_equal(np.concatenate(parts), wanted)
    assert len(np.unique(wanted[:, 0])) > 200
