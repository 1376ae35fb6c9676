"""Vocabularies joined by the text that their tokens stand for."""

from types import SimpleNamespace

import numpy as np
import pytest

from ml_factory.errors import SettingsError
from ml_factory.recipes.language_models import byte_tokenizer
from ml_factory.recipes.surrogate import join_vocabularies, token_contents


def tokenizer(*tokens: str, specials: tuple[str, ...] = ("<eos>",)):
    vocabulary = {token: number for number, token in enumerate((*specials, *tokens))}
    return SimpleNamespace(vocabulary=vocabulary, specials=frozenset(specials), end=0)


def test_token_contents_agree_for_three_ways_to_mark_start_of_word():
    byte_level = token_contents({"Ġthe": 4, "ing": 5, "Ċ": 6, "Ã©": 7})
    sentence_piece = token_contents({"▁the": 9, "ing": 1, "<0x0A>": 2, "é": 3})
    assert byte_level == {b" the": 4, b"ing": 5, b"\n": 6, "é".encode(): 7}
    assert set(sentence_piece) == set(byte_level)
    assert token_contents({"the": 1, "##ing": 2, "##s": 3}) == {b" the": 1, b"ing": 2, b"s": 3}


def test_token_contents_prefer_token_to_fall_back_byte_of_same_content():
    assert token_contents({"<0x61>": 0, "a": 5, "▁b": 6, "▁": 7, "<0x20>": 1}) == {b"a": 5, b" b": 6, b" ": 7}


def test_join_vocabularies_maps_both_ways_and_counts_share():
    base, surrogate = tokenizer("Ġa", "b", "Ġc"), tokenizer("▁c", "▁a", "x", "▁y")
    join = join_vocabularies(base, surrogate, surrogate_size=7)
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
    assert join_vocabularies(tokenizer(*base), surrogate).surrogate_of_base.tolist() == wanted


def test_join_vocabularies_with_less_than_half_matched_is_refused_with_share():
    join = join_vocabularies(tokenizer("Ġa", "b", "c", "d"), tokenizer("▁a", "q"))
    with pytest.raises(SettingsError, match=r"one and two.*got 40.0% of 5 tokens, wanted at least 50%"):
        join.check("one", "two")


def test_byte_tokenizer_round_trip_and_join_with_byte_level_vocabulary():
    own = byte_tokenizer()
    assert bytes(own.encode(["é\n"])[0].astype(np.uint8)) == "é\n".encode()
    join = join_vocabularies(own, tokenizer(*sorted(own.vocabulary, key=own.vocabulary.get)[:256], "Ġthe"))
    assert join.matched == join.size and join.surrogate_of_base[ord("\n")] == 1 + ord("\n")
