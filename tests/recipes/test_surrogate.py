"""The surrogate's tokens: by a slow reference, the same from the cache and in the step, resumed after a kill."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.recipes import surrogate
from ml_factory.recipes.language_models import load_causal_model
from ml_factory.recipes.surrogate import (
    SurrogateTopTokens,
    VocabularyJoin,
    cache_top_tokens,
    join_vocabularies,
)
from ml_factory.training.device import Device

CPU = Device("cpu", 1)
ROWS, LENGTH, K = 23, 16, 5


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that likely tokens differ from position to position."""
    loaded = load_causal_model("builtin:tiny", LENGTH, seed=3)
    with torch.no_grad():
        for weight in loaded.network.parameters():
            weight.mul_(4.0)
    return loaded


@pytest.fixture
def rows(monkeypatch):
    """Tokens; the cache is written in pieces of four or eight rows."""
    monkeypatch.setattr(surrogate, "PIECE_BYTES", 4 * 4 * LENGTH * K)
    return np.random.default_rng(0).integers(0, 257, (ROWS, LENGTH)).astype(np.int32)


def top_of(model, rows_at_once: int = 1, join: VocabularyJoin | None = None) -> SurrogateTopTokens:
    join = join or join_vocabularies(model.tokenizer, model.tokenizer)
    return SurrogateTopTokens(model.network, join, K, 256, CPU, rows_at_once)


def test_top_tokens_equal_slow_reference_with_other_vocabulary(model):
    """The base has 40 tokens, numbered backwards in the surrogate; two of them the surrogate lacks."""
    surrogate_of_base, base_of_surrogate = np.arange(256, 216, -1).astype(np.int32), np.full(257, -1, np.int32)
    surrogate_of_base[[3, 7]] = -1
    base_of_surrogate[surrogate_of_base[surrogate_of_base >= 0]] = np.flatnonzero(surrogate_of_base >= 0)
    join = VocabularyJoin(surrogate_of_base, base_of_surrogate, 38, 40)
    tokens = torch.tensor(np.random.default_rng(1).integers(0, 40, (3, LENGTH)).astype(np.int32))
    tokens[0, 4], tokens[1, 5] = 3, 7
    ids, logprobs = top_of(model, join=join)(tokens)
    for b in range(3):
        read = [int(surrogate_of_base[t]) if surrogate_of_base[t] >= 0 else 256 for t in tokens[b].tolist()]
        expected = torch.log_softmax(model.network(torch.tensor([read])).detach()[0], dim=-1)
        for t in range(LENGTH):
            if tokens[b, t] in (3, 7):
                assert ids[b, t].tolist() == [-1] * K and torch.isinf(logprobs[b, t]).all()
                continue
            both = {int(own): float(expected[t, other]) for own, other in enumerate(surrogate_of_base) if other >= 0}
            likely = sorted(both, key=both.get, reverse=True)[:K]
            assert ids[b, t].tolist() == likely
            assert logprobs[b, t].tolist() == pytest.approx([both[one] for one in likely], abs=1e-5)
    assert ids.dtype == torch.int32 and logprobs.dtype == torch.float32


def test_top_tokens_do_not_follow_the_number_format_of_the_step(model, rows):
    tokens = torch.from_numpy(rows[np.arange(2)])
    plain = top_of(model)(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = top_of(model)(tokens)
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


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


def test_top_tokens_more_than_vocabulary_are_refused(model):
    with pytest.raises(SettingsError, match="surrogate_k"):
        SurrogateTopTokens(model.network, join_vocabularies(model.tokenizer, model.tokenizer), 300, 256, CPU, 1)


def test_model_check_names_wrong_vocabulary_and_length(model):
    assert model.check(LENGTH) is model
    with pytest.raises(SettingsError, match="shorter sequences"):
        model.check(LENGTH + 1)
    small = SimpleNamespace(**vars(model.tokenizer) | {"vocabulary": {"a": 300}})
    with pytest.raises(SettingsError, match="tokens that the model lacks"):
        replace(model, tokenizer=small).check(LENGTH)
