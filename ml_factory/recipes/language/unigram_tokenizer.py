"""Tokenizers as T5 has them: pieces with log probabilities, trained from rows; and a slow one to compare with."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.json_values import parse_json

tokenizers, transformers = LazyModule("tokenizers"), LazyModule("transformers")


PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2, as in T5
_PENALTY = 10.0  # of an unknown character, below the least likely piece


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


class SlowTokenizer:
    """The same tokens as a fast unigram tokenizer, found by the Viterbi algorithm in plain Python."""

    def __init__(self, fast: Any):
        self._fast = fast.backend_tokenizer
        model = parse_json(self._fast.to_str())["model"]
        if model["type"] != "Unigram":
            raise SettingsError("Only unigram tokenizers have a slow one", where="tokenizer", got=model["type"])
        self._scores = {text: (at, score) for at, (text, score) in reversed(list(enumerate(model["vocab"])))}
        self._longest = max(map(len, self._scores))
        self._unknown, self._lowest = model["unk_id"], min(score for _, score in self._scores.values()) - _PENALTY

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without the end."""
        if self._fast.normalizer is not None:
            text = self._fast.normalizer.normalize_str(text)
        words = [word for word, _ in self._fast.pre_tokenizer.pre_tokenize_str(text)]
        return [at for word in words for at in self._best(word)]

    def _best(self, word: str) -> Iterable[int]:
        best: list[tuple[float, int, int] | None] = [(0.0, 0, -1), *[None] * len(word)]  # score, start, id
        for start in range(len(word)):
            before, single = best[start][0], False
            for end in range(start + 1, min(start + self._longest, len(word)) + 1):
                piece = self._scores.get(word[start:end])
                if piece is None:
                    continue
                single = single or end == start + 1
                if best[end] is None or before + piece[1] > best[end][0]:
                    best[end] = before + piece[1], start, piece[0]
            if not single and (best[start + 1] is None or before + self._lowest > best[start + 1][0]):
                best[start + 1] = before + self._lowest, start, self._unknown
        found, at = [], len(word)
        while at:
            _, start, piece = best[at]
            if not (piece == self._unknown and found and found[-1] == piece):  # neighbours are one unknown token
                found.append(piece)
            at = start
        return reversed(found)


def compare_tokenizers(fast: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Return tokens a second of the fast tokenizer and the slow one on these texts, and the share of equal texts.

    Only a unigram tokenizer has a slow one; of another the fast speed alone is returned.
    """
    texts, began = list(texts), time.perf_counter()
    ids = fast(texts, add_special_tokens=False, verbose=False)["input_ids"]
    seconds, count = time.perf_counter() - began, sum(map(len, ids))
    found = {"texts": len(texts), "tokens": count, "fast_tokens_per_second": count / max(seconds, 1e-9)}
    try:
        slow = SlowTokenizer(fast)
    except SettingsError:
        return found
    began = time.perf_counter()
    theirs = [slow.encode(text) for text in texts]
    seconds = time.perf_counter() - began
    equal = sum(one == other for one, other in zip(ids, theirs, strict=True))
    rate = count / max(seconds, 1e-9)
    return found | {"slow_tokens_per_second": rate, "times": found["fast_tokens_per_second"] / rate,
                    "equal": equal / max(len(texts), 1)}  # fmt: skip
