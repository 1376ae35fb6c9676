"""Two vocabularies joined by token string, so that one model reads and scores the tokens of another."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import SettingsError
from ml_factory.recipes.language.causal_lm import Tokenizer, byte_characters

LEAST_SHARE = 0.5  # of the base vocabulary that must have a token of the surrogate
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START, _BYTE_SPACE, _CONTINUED = "\u2581", "\u0120", "##"  # of SentencePiece, of byte-level BPE, of WordPiece


@dataclass(frozen=True)
class VocabularyJoin:
    """Tokens that two vocabularies have in common.

    surrogate_of_base : int32 (tokens of the base), id of the same token in the surrogate, -1 where it has none.
    base_of_surrogate : int32 (tokens of the surrogate), the other way round.
    matched : number of tokens of the base that the surrogate has.
    """

    surrogate_of_base: np.ndarray
    base_of_surrogate: np.ndarray
    matched: int
    size: int

    @property
    def share(self) -> float:
        """Share of the base vocabulary that the surrogate has."""
        return self.matched / self.size if self.size else 0.0

    def check(self, base: str, surrogate: str) -> "VocabularyJoin":
        """Return self. Raises SettingsError where less than half of the base vocabulary is matched."""
        if self.share < LEAST_SHARE:
            raise SettingsError(
                "The two vocabularies have too few tokens in common", where=f"{base} and {surrogate}",
                got=f"{self.share:.1%} of {self.size:,} tokens", wanted=f"at least {LEAST_SHARE:.0%}",
                next_step="choose a surrogate with a tokenizer of the same kind",
            )  # fmt: skip
        return self

    def share_of_text(self, tokens: np.ndarray) -> float:
        """Return the share of these tokens of a text that the surrogate has."""
        return float((self.surrogate_of_base[tokens.ravel()] >= 0).mean()) if tokens.size else 0.0


def join_vocabularies(
    base: Tokenizer, surrogate: Tokenizer, base_size: int = 0, surrogate_size: int = 0
) -> VocabularyJoin:
    """Join by the bytes that a token stands for, whatever marks the start of a word; ends of texts are joined too.

    base_size, surrogate_size : columns of the models' logits, where they have more than the tokenizers' tokens.
    """
    ours, theirs = (token_contents(one.vocabulary, one.specials) for one in (base, surrogate))
    surrogate_of_base = np.full(max(base_size, 1 + max(base.vocabulary.values())), -1, np.int32)
    base_of_surrogate = np.full(max(surrogate_size, 1 + max(surrogate.vocabulary.values())), -1, np.int32)
    pairs = [(token, theirs[content]) for content, token in ours.items() if content in theirs]
    for token, other in [*pairs, (base.end, surrogate.end)]:
        surrogate_of_base[token], base_of_surrogate[other] = other, token
    return VocabularyJoin(
        surrogate_of_base, base_of_surrogate, int((surrogate_of_base >= 0).sum()), len(base.vocabulary)
    )


def token_contents(vocabulary: Mapping[str, int], specials: frozenset[str] = frozenset()) -> dict[bytes, int]:
    """Return id by the bytes of text that a token stands for; a space is the start of a word. Special tokens have none.

    Of several tokens with one content (a letter and its fall-back byte) the one that is not a fall-back is taken, then
    the lowest id.
    """
    texts = [text for text in vocabulary if text not in specials]
    decode = _decoder(texts)
    found: dict[bytes, int] = {}
    for text in sorted(texts, key=lambda text: (bool(_BYTE_FALLBACK.fullmatch(text)), vocabulary[text])):
        found.setdefault(decode(text), vocabulary[text])
    return found


def _decoder(texts: list[str]):
    """Return the function from a token string to its bytes, by the marker that most of the vocabulary uses."""
    counts = {
        mark: sum(text.startswith(mark) for text in texts) for mark in (_BYTE_SPACE, _WORD_START, _CONTINUED)
    }  # fmt: skip
    mark = max(counts, key=lambda mark: counts[mark])
    if not counts[mark]:
        return str.encode
    return {_BYTE_SPACE: _byte_level, _WORD_START: _sentence_piece, _CONTINUED: _word_piece}[mark]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


def _byte_level(text: str) -> bytes:
    if all(character in _BYTES for character in text):
        return bytes(_BYTES[character] for character in text)
    return text.encode()


def _sentence_piece(text: str) -> bytes:
    fallback = _BYTE_FALLBACK.fullmatch(text)
    return bytes([int(fallback[1], 16)]) if fallback else text.replace(_WORD_START, " ").encode()


def _word_piece(text: str) -> bytes:
    return text[len(_CONTINUED) :].encode() if text.startswith(_CONTINUED) else b" " + text.encode()
