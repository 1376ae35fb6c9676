"""The cache of a surrogate's tokens, resumed after a kill."""
# ruff: noqa: F811 - a fixture of the contract

import numpy as np
import pytest

from ml_factory.recipes import surrogate
from ml_factory.recipes.surrogate import SurrogateTopTokens, cache_top_tokens
from tests.contract.test_surrogate import LENGTH, K, model, top_of  # noqa: F401 - a fixture

ROWS = 23


@pytest.fixture
def rows(monkeypatch):
    """Tokens; the cache is written in pieces of four or eight rows."""
    monkeypatch.setattr(surrogate, "PIECE_BYTES", 4 * 4 * LENGTH * K)
    return np.random.default_rng(0).integers(0, 257, (ROWS, LENGTH)).astype(np.int32)


def test_cache_killed_goes_on_at_the_last_whole_piece(model, rows, tmp_path, monkeypatch):
    whole = cache_top_tokens(rows, top_of(model), tmp_path / "whole")

    dying, calls, real = top_of(model), [], SurrogateTopTokens.__call__

    def call(self, tokens):
        calls.append(1)
        if len(calls) == 11:
            raise KeyboardInterrupt
        return real(self, tokens)

    monkeypatch.setattr(SurrogateTopTokens, "__call__", call)
    with pytest.raises(KeyboardInterrupt):
        cache_top_tokens(rows, dying, tmp_path / "killed")
    resumed = cache_top_tokens(rows, dying, tmp_path / "killed")
    assert len(calls) - 11 == ROWS - 8  # two pieces of four rows were whole
    assert all(np.array_equal(one, other) for one, other in zip(resumed, whole, strict=True))
