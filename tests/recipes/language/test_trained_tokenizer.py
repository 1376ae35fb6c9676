"""The trained tokenizer: a function of the texts."""

import pytest

from ml_factory.recipes.language.labelled_text import made_up_texts
from ml_factory.recipes.language.trained_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(made_up_texts(300, 0).texts, 150, 64)


def test_tokenizer_is_a_function_of_the_texts_and_ends_with_its_end(tokenizer):
    again = train_tokenizer(made_up_texts(300, 0).texts, 150, 64)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    ids = tokenizer("the ship near the harbour")["input_ids"]
    assert ids[-1] == 1 and tokenizer.decode(ids, skip_special_tokens=True) == "the ship near the harbour"
    assert len(tokenizer) <= 150 and tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
    assert 2 in tokenizer("Ω")["input_ids"]
