"""The K tokens that a frozen second model finds most likely at each position, in the vocabulary of the first.

Vocabularies are joined by token string; the tokens are computed in the step, or cached on disk. N rows, B rows of a
batch, T positions, K tokens, V tokens of the surrogate's vocabulary.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.recipes.language_models import Tokenizer, open_rows
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.training.device import Device

slow_tokenizers = LazyModule("transformers.convert_slow_tokenizer")
PIECE_BYTES = 1 << 24
DONE = "done.json"
LEAST_SHARE = 0.5  # of the base vocabulary that must have a token of the surrogate
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START, _BYTE_SPACE, _CONTINUED = "\u2581", "\u0120", "##"  # of SentencePiece, of byte-level BPE, of WordPiece


@dataclass(frozen=True)
class VocabularyJoin:
    """Tokens that two vocabularies have in common.

    surrogate_of_base : int32 (tokens of the base), id of the same token in the surrogate, -1 where it has none.
    base_of_surrogate : int32 (tokens of the surrogate), the other way round.
    size : tokens of the base; matched : those that the surrogate has.
    """

    surrogate_of_base: np.ndarray
    base_of_surrogate: np.ndarray
    matched: int
    size: int

    def check(self, base: str, surrogate: str) -> None:
        """Raise SettingsError where less than half of the base vocabulary is matched."""
        if self.matched < LEAST_SHARE * self.size:
            raise SettingsError(
                "The two vocabularies have too few tokens in common", where=f"{base} and {surrogate}",
                got=f"{self.matched / self.size:.1%} of {self.size:,} tokens", wanted=f"at least {LEAST_SHARE:.0%}",
                next_step="choose a surrogate with a tokenizer of the same kind",
            )  # fmt: skip


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
    matched = int((surrogate_of_base >= 0).sum())
    return VocabularyJoin(surrogate_of_base, base_of_surrogate, matched, len(base.vocabulary))


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


def _decoder(texts: list[str]) -> Callable[[str], bytes]:
    """Return the function from a token string to its bytes, by the marker that most of the vocabulary uses."""
    byte_of = {spelt: byte for byte, spelt in slow_tokenizers.bytes_to_unicode().items()}

    def byte_level(text: str) -> bytes:
        known = all(character in byte_of for character in text)
        return bytes(byte_of[character] for character in text) if known else text.encode()

    def sentence_piece(text: str) -> bytes:
        fallback = _BYTE_FALLBACK.fullmatch(text)
        return bytes([int(fallback[1], 16)]) if fallback else text.replace(_WORD_START, " ").encode()

    def word_piece(text: str) -> bytes:
        return text.removeprefix(_CONTINUED).encode() if text.startswith(_CONTINUED) else b" " + text.encode()

    decoders = {_BYTE_SPACE: byte_level, _WORD_START: sentence_piece, _CONTINUED: word_piece}
    counts = {mark: sum(text.startswith(mark) for text in texts) for mark in decoders}
    mark = max(counts, key=lambda mark: counts[mark])
    return decoders[mark] if counts[mark] else str.encode


class SurrogateTopTokens:
    """Function from tokens of the base model (B, T) to (ids int32 (B, T, K), logprobs float32 (B, T, K)).

    The surrogate reads the base's tokens as its own tokens of the same text, its own end of a text for those it lacks.
    Probabilities are of its whole vocabulary; tokens that the base lacks are passed over. A position whose own token it
    lacks has none (ids of -1): it would predict from a stand-in.

    rows_at_once : rows of one forward pass. It is always this many, so that the numbers of a row do not depend on the
        batch it comes in, and a cache equals what the step computes.
    """

    def __init__(self, network: nn.Module, join: VocabularyJoin, k: int, end: int, device: Device, rows_at_once: int):
        usable = int((join.base_of_surrogate >= 0).sum())
        if not 1 <= k <= usable:
            raise SettingsError("The surrogate has fewer tokens", where="surrogate_k", got=k, wanted=f"1 to {usable:,}")
        self.device, self.k, self.rows_at_once = device, k, rows_at_once
        self.network = device.to_device(network.eval().requires_grad_(False))
        read = np.where(join.surrogate_of_base >= 0, join.surrogate_of_base, end)
        self._read_V = device.to_device(torch.from_numpy(read.astype(np.int64)))
        self._known_V = device.to_device(torch.from_numpy(join.surrogate_of_base >= 0))
        self._write_V = device.to_device(torch.from_numpy(join.base_of_surrogate))

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = len(tokens_BT), self.rows_at_once
        missing = -rows % size
        padded_BT = torch.cat([tokens_BT, tokens_BT[-1:].expand(missing, -1)]) if missing else tokens_BT
        # The step's number format does not apply: the surrogate has its own.
        with torch.autocast(self.device.kind, enabled=False):
            parts = [self._of_rows(padded_BT[start : start + size]) for start in range(0, rows, size)]
        ids, logprobs = (torch.cat(part)[:rows] for part in zip(*parts, strict=True))
        return ids, logprobs

    def _of_rows(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        tokens_BT = tokens_BT.long()
        logits_BTV = self.network(self._read_V[tokens_BT]).float()
        logprobs_BTV = logits_BTV - logits_BTV.logsumexp(dim=-1, keepdim=True)
        write_V = self._write_V[: logprobs_BTV.shape[-1]]
        top = logprobs_BTV.masked_fill(write_V < 0, -torch.inf).topk(self.k, dim=-1)
        known_BT1 = self._known_V[tokens_BT][..., None]
        return torch.where(known_BT1, write_V[top.indices], -1), torch.where(known_BT1, top.values, -torch.inf)


def cache_top_tokens(
    rows: np.ndarray, top_tokens: SurrogateTopTokens, folder: str | os.PathLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids int32, logprobs float32) of all rows, (N, T, K) each on disk, computed once and kept in `folder`.

    They equal what a step computes to the bit. A process that is killed goes on at the last piece of 16 MB that it
    wrote whole. Several processes that ask for the same wait for the first.
    """
    folder, shape, size = Path(folder), (*rows.shape, top_tokens.k), top_tokens.rows_at_once
    paths = {folder / "ids.npy": np.int32, folder / "logprobs.npy": np.float32}
    piece = -(-max(PIECE_BYTES // (4 * shape[1] * shape[2]), 1) // size) * size
    with file_lock(folder / "lock"), progress_phase("surrogate", len(rows)) as moved:
        done = files.read_json(folder / DONE)["rows"] if files.is_file(folder / DONE) else 0
        if not done:
            for path, kind in paths.items():
                np.lib.format.open_memmap(path, "w+", kind, shape)
        kept = [open_rows(path, "r+") for path in paths]
        moved(done)
        for start in range(done, len(rows), piece):
            inside = rows[start : start + piece]
            parts = []
            for at in range(0, len(inside), size):
                tokens_BT = torch.from_numpy(np.array(inside[at : at + size]))
                found = top_tokens(top_tokens.device.to_device(tokens_BT))
                top_tokens.device.mark_step("surrogate")
                parts.append([part.cpu().numpy() for part in found])
            for array, values in zip(kept, zip(*parts, strict=True), strict=True):
                array[start : start + len(inside)] = np.concatenate(values)
                array.flush()
            files.write_json(folder / DONE, {"rows": start + len(inside)})
            moved(len(inside))
    ids, logprobs = map(open_rows, paths)
    return ids, logprobs
