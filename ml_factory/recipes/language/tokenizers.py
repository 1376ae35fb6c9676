"""Tokenizers: the built-in one of bytes, which needs no file, and any fast one of Hugging Face by name or path."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.lazy_module import LazyModule

transformers = LazyModule("transformers")

END_OF_TEXT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Text to tokens.

    vocabulary : token string -> id.
    specials : token strings that stand for no text, such as the end of a text.
    end : id of the end of a text.
    fingerprint : hash of what decides the ids.
    """

    vocabulary: dict[str, int]
    specials: frozenset[str]
    end: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int32 ids of each text, without special tokens."""


def byte_characters() -> list[str]:
    """Return the printable character that stands for each byte 0 .. 255 in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table, extra = [], 0
    for byte in range(256):
        table.append(chr(byte if byte in printable else 256 + extra))
        extra += byte not in printable
    return table


class ByteTokenizer:
    """The built-in tokenizer: a token for each byte of UTF-8, and the end of a text. Its strings are as in GPT-2."""

    def __init__(self) -> None:
        self.vocabulary = {character: byte for byte, character in enumerate(byte_characters())} | {END_OF_TEXT: 256}
        self.specials, self.end = frozenset({END_OF_TEXT}), 256
        self.fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int32) for text in texts]


class HuggingFaceTokenizer:
    """A tokenizer of transformers. name : name at the hub, or folder."""

    def __init__(self, name: str):
        with hub_errors("The tokenizer", name):
            self._inner = transformers.AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
        self.vocabulary = dict(self._inner.get_vocab())
        self.specials = frozenset(self._inner.all_special_tokens)
        if self._inner.eos_token_id is None:
            raise SettingsError("The tokenizer has no token for the end of a text", where=name,
                                next_step="use a tokenizer with an eos_token")  # fmt: skip
        self.end = int(self._inner.eos_token_id)
        backend = getattr(self._inner, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else json.dumps(self.vocabulary, sort_keys=True)
        self.fingerprint = hashlib.sha256(rules.encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The tokenizer's own limit on lengths does not matter: texts are cut into sequences afterwards.
        ids = self._inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(one, np.int32) for one in ids["input_ids"]]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into the folder."""
        self._inner.save_pretrained(str(folder))


@contextmanager
def hub_errors(what: str, name: str) -> Iterator[None]:
    """Inside the block, errors of transformers become one line that names the model. what : what is loaded."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, FactoryError):
            raise
        raise SettingsError(
            f"{what} cannot be loaded", where=name, got=" ".join(str(error).split())[:200],
            wanted="a name at the Hugging Face hub that this machine reaches or has cached, or a folder with "
            "safetensors", next_step="check the name; without a network give a folder, or builtin:small",
        ) from error  # fmt: skip
