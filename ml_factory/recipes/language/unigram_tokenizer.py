"""Tokenizers as T5 has them: pieces with log probabilities, trained from rows."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ml_factory.lazy_module import LazyModule

tokenizers, transformers = LazyModule("tokenizers"), LazyModule("transformers")


PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2, as in T5


def train_unigram_tokenizer(texts: Sequence[str], vocabulary: int, positions: int) -> Any:
    """Return a fast tokenizer of transformers with at most so many pieces, a function of the texts alone.

    The pieces are those of byte-pair encoding, whose trainer is deterministic; that of tokenizers for unigrams is not.
    Their probabilities are their shares in the texts.
    """
    specials = [PAD, END, UNKNOWN]
    pairs = _with_blanks(tokenizers.models.BPE(unk_token=UNKNOWN))
    pairs.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=specials, show_progress=False))  # fmt: skip
    counts: Counter = Counter()
    for one in pairs.encode_batch(list(texts)):
        counts.update(one.ids)
    pieces = sorted(pairs.get_vocab().items(), key=lambda item: item[1])
    total = sum(counts.values()) + len(pieces)
    scores = [(text, 0.0 if text in specials else math.log((counts[at] + 1) / total)) for text, at in pieces]
    made = _with_blanks(tokenizers.models.Unigram(scores, unk_id=2, byte_fallback=False))
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=positions
    )


def _with_blanks(model: Any) -> Any:
    """Return a tokenizer that normalises characters and marks the start of each word, as sentencepiece does."""
    made = tokenizers.Tokenizer(model)
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    return made
