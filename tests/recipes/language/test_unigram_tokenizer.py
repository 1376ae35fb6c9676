"""The trained tokenizer: a function of the texts, equal to a slow one written in plain Python."""

import random

import pytest

from ml_factory.errors import SettingsError
from ml_factory.recipes.language.labelled_text import made_up_texts
from ml_factory.recipes.language.unigram_tokenizer import SlowTokenizer, compare_tokenizers, train_unigram_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_unigram_tokenizer(made_up_texts(300, 0).texts, 150, 64)


def test_fast_tokenizer_equals_slow_one_on_known_and_unknown_characters(tokenizer):
    drawn, slow = random.Random(0), SlowTokenizer(tokenizer)
    alphabet = "abcdeghilnoprst ship bread Ω漢☃é\u00a0zz"
    texts = ["", " ", "ΩΩ ship", *("".join(drawn.choices(alphabet, k=drawn.randrange(40))) for _ in range(300))]
    fast = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert [slow.encode(text) for text in texts] == fast
    assert any(2 in row for row in fast)
    facts = compare_tokenizers(tokenizer, texts)
    assert facts["equal"] == 1.0 and facts["tokens"] == sum(map(len, fast)) and facts["slow_tokens_per_second"] > 0


def test_tokenizer_is_a_function_of_the_texts_and_ends_with_its_end(tokenizer):
    again = train_unigram_tokenizer(made_up_texts(300, 0).texts, 150, 64)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    ids = tokenizer("the ship near the harbour")["input_ids"]
    assert ids[-1] == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "the ship near the harbour"
    assert len(tokenizer) <= 150 and tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]


def test_tokenizer_of_another_kind_has_no_slow_one():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(SettingsError, match="Only unigram"):
        SlowTokenizer(words)
    assert "slow_tokens_per_second" not in compare_tokenizers(words, ["a a"])
