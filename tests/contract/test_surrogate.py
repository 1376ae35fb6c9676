"""The surrogate's tokens by a slow reference, and joined vocabularies."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ml_factory.errors import SettingsError
from tests.contract import doors

CPU = doors.Device("cpu", 1)
LENGTH, K = 16, 5


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that likely tokens differ from position to position."""
    loaded = doors.load_causal_model("builtin:tiny", LENGTH, seed=3)
    with torch.no_grad():
        for weight in loaded.network.parameters():
            weight.mul_(4.0)
    return loaded


def top_of(model, rows_at_once: int = 1, join: doors.VocabularyJoin | None = None) -> doors.SurrogateTopTokens:
    join = join or doors.join_vocabularies(model.tokenizer, model.tokenizer)
    return doors.SurrogateTopTokens(model.network, join, K, 256, CPU, rows_at_once)


def test_top_tokens_equal_slow_reference_with_other_vocabulary(model):
    """The base has 40 tokens, numbered backwards in the surrogate; two of them the surrogate lacks."""
    surrogate_of_base, base_of_surrogate = np.arange(256, 216, -1).astype(np.int32), np.full(257, -1, np.int32)
    surrogate_of_base[[3, 7]] = -1
    base_of_surrogate[surrogate_of_base[surrogate_of_base >= 0]] = np.flatnonzero(surrogate_of_base >= 0)
    join = doors.VocabularyJoin(surrogate_of_base, base_of_surrogate, 38, 40)
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


def test_top_tokens_do_not_follow_the_number_format_of_the_step(model):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 257, (2, LENGTH)).astype(np.int32))
    plain = top_of(model)(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = top_of(model)(tokens)
    assert all(torch.equal(one, other) for one, other in zip(plain, inside, strict=True))


def test_top_tokens_more_than_vocabulary_are_refused(model):
    with pytest.raises(SettingsError, match="surrogate_k"):
        doors.SurrogateTopTokens(
            model.network, doors.join_vocabularies(model.tokenizer, model.tokenizer), 300, 256, CPU, 1
        )


def test_model_check_names_wrong_vocabulary_and_length(model):
    assert model.check(LENGTH) is model
    with pytest.raises(SettingsError, match="shorter sequences"):
        model.check(LENGTH + 1)
    small = SimpleNamespace(**vars(model.tokenizer) | {"vocabulary": {"a": 300}})
    with pytest.raises(SettingsError, match="tokens that the model lacks"):
        replace(model, tokenizer=small).check(LENGTH)


# ---- vocabularies joined by the text that their tokens stand for ----------------------------------------------------


def tokenizer(*tokens: str, specials: tuple[str, ...] = ("<eos>",)):
    vocabulary = {token: number for number, token in enumerate((*specials, *tokens))}
    return SimpleNamespace(vocabulary=vocabulary, specials=frozenset(specials), end=0)


def test_token_contents_agree_for_three_ways_to_mark_start_of_word():
    byte_level = doors.token_contents({"Ġthe": 4, "ing": 5, "Ċ": 6, "Ã©": 7})
    sentence_piece = doors.token_contents({"▁the": 9, "ing": 1, "<0x0A>": 2, "é": 3})
    assert byte_level == {b" the": 4, b"ing": 5, b"\n": 6, "é".encode(): 7}
    assert set(sentence_piece) == set(byte_level)
    assert doors.token_contents({"the": 1, "##ing": 2, "##s": 3}) == {b" the": 1, b"ing": 2, b"s": 3}


def test_token_contents_prefer_token_to_fall_back_byte_of_same_content():
    assert doors.token_contents({"<0x61>": 0, "a": 5, "▁b": 6, "▁": 7, "<0x20>": 1}) == {b"a": 5, b" b": 6, b" ": 7}


def test_join_vocabularies_maps_both_ways_and_counts_share():
    base, surrogate = tokenizer("Ġa", "b", "Ġc"), tokenizer("▁c", "▁a", "x", "▁y")
    join = doors.join_vocabularies(base, surrogate, surrogate_size=7)
    assert join.surrogate_of_base.tolist() == [0, 2, -1, 1]
    assert join.base_of_surrogate.tolist() == [0, 3, 1, -1, -1, -1, -1]
    assert (join.matched, join.size) == (3, 4)
    join.check("base", "surrogate")


@pytest.mark.parametrize(
    ("base", "surrogate", "wanted"),
    [
        (("Ġa", "a"), tokenizer("▁a", "b"), [0, 1, -1]),  # the start of a word is not its inside
        (("a", "Ġb", "<pad>"), tokenizer("a", "▁b", specials=("<eos>", "<pad>")), [0, 2, 3, -1]),
    ],
)
def test_join_vocabularies_matches_no_other_text_and_no_special_token(base, surrogate, wanted):
    assert doors.join_vocabularies(tokenizer(*base), surrogate).surrogate_of_base.tolist() == wanted


def test_join_vocabularies_with_less_than_half_matched_is_refused_with_share():
    join = doors.join_vocabularies(tokenizer("Ġa", "b", "c", "d"), tokenizer("▁a", "q"))
    with pytest.raises(SettingsError, match=r"one and two.*got 40.0% of 5 tokens, wanted at least 50%"):
        join.check("one", "two")


def test_byte_tokenizer_round_trip_and_join_with_byte_level_vocabulary():
    own = doors.byte_tokenizer()
    assert bytes(own.encode(["é\n"])[0].astype(np.uint8)) == "é\n".encode()
    join = doors.join_vocabularies(own, tokenizer(*sorted(own.vocabulary, key=own.vocabulary.get)[:256], "Ġthe"))
    assert join.matched == join.size and join.surrogate_of_base[ord("\n")] == 1 + ord("\n")
