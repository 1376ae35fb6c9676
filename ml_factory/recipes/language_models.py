"""Causal language models of transformers with their tokenizers, built in or by name or path; text in rows of tokens.

B sequences, N rows, T positions, V tokens of the vocabulary.
"""

import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import FactoryError, FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import file_lock
from ml_factory.storage.mirror import fetch_file
from ml_factory.training.device import drawn_from

transformers, tokenizers = LazyModule("transformers"), LazyModule("tokenizers")
datasets = LazyModule("datasets")
slow_tokenizers = LazyModule("transformers.convert_slow_tokenizer")

BUILTIN, END_OF_TEXT = "builtin:", "<|endoftext|>"
SIZES = {"tiny": (64, 2, 2), "small": (128, 4, 4), "medium": (256, 6, 8)}  # width, layers, heads of a GPT-2
_KINDS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
AT_ONCE = 1024  # pieces of text that are tokenized together
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Tokenizer:
    """A tokenizer of transformers.

    inner : the tokenizer itself.
    vocabulary : token string -> id.
    specials : token strings that stand for no text, such as the end of a text.
    end : id of the end of a text.
    fingerprint : hash of what decides the ids.
    """

    def __init__(self, inner: Any):
        self.inner, self.end = inner, int(inner.eos_token_id)
        self.vocabulary, self.specials = dict(inner.get_vocab()), frozenset(inner.all_special_tokens)
        self.fingerprint = tokenizer_fingerprint(inner)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int32 ids of each text, without special tokens."""
        # The tokenizer's own limit on lengths does not matter: texts are cut into sequences afterwards.
        ids = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(one, np.int32) for one in ids["input_ids"]]


def tokenizer_fingerprint(inner: Any) -> str:
    """Return the hash of what decides the ids of a tokenizer of transformers; one in pure Python has its vocabulary."""
    backend = getattr(inner, "backend_tokenizer", None)
    return fingerprint_json(dict(inner.get_vocab()) if backend is None else backend.to_str())[:16]


def byte_tokenizer() -> Tokenizer:
    """Return the built-in tokenizer: a token for each byte of UTF-8, spelt as in GPT-2, and the end of a text."""
    spelt = slow_tokenizers.bytes_to_unicode()
    tokens = [*(spelt[byte] for byte in range(256)), END_OF_TEXT]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END_OF_TEXT))


class LogitsOf(nn.Module):
    """A causal model of transformers as a function from tokens_BT to logits_BTV."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BT, use_cache=False).logits


@dataclass(frozen=True)
class LanguageModel:
    """A causal model with its tokenizer.

    network : function from tokens_BT int64 to logits_BTV.
    vocabulary : columns of the logits.
    positions : longest sequence that it reads; 0 for any.
    """

    name: str
    network: LogitsOf
    tokenizer: Tokenizer
    vocabulary: int
    positions: int

    def check(self, length: int) -> "LanguageModel":
        """Return self after a forward pass on the host. Raises SettingsError where model and tokenizer do not fit."""
        if self.positions and length > self.positions:
            raise SettingsError("The model reads shorter sequences", where=self.name, got=f"max_seq_length {length}",
                                wanted=f"at most {self.positions}")  # fmt: skip
        tokens = 1 + max(self.tokenizer.vocabulary.values())
        if tokens > self.vocabulary:
            raise SettingsError("The tokenizer has tokens that the model lacks", where=self.name,
                                got=f"{tokens:,} tokens", wanted=f"at most {self.vocabulary:,}")  # fmt: skip
        tokens_BT = torch.full((1, min(length, 8)), self.tokenizer.end)
        with torch.no_grad():
            logits_BTV = self.network.eval()(tokens_BT)
        if logits_BTV.shape != (*tokens_BT.shape, self.vocabulary) or not torch.isfinite(logits_BTV.float()).all():
            raise SettingsError("A forward pass of the model fails", where=self.name,
                                got=f"logits of the shape {tuple(logits_BTV.shape)}, or not finite",
                                wanted=f"finite {(*tokens_BT.shape, self.vocabulary)}")  # fmt: skip
        return self


def load_causal_model(
    name: str, length: int, *, seed: int = 0, from_scratch: bool = False, dtype: str = "float32"
) -> LanguageModel:
    """Load a causal model: builtin:tiny, small or medium; else a folder or a name at the Hugging Face hub.

    length : positions of a built-in model.
    seed : of the first weights, where they are random: always for a built-in one, else with `from_scratch`.
    dtype : of the weights.
    """
    kind, given = transformers.AutoModelForCausalLM, {"dtype": DTYPES[dtype]}
    with hub_errors("The model", name):
        if name.startswith(BUILTIN):
            tokenizer, config = byte_tokenizer(), _built_in_config(name, length)
        else:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            inner = transformers.AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
            tokenizer = Tokenizer(inner)
        if from_scratch or name.startswith(BUILTIN):
            with drawn_from(seed, name):
                model = kind.from_config(config, **given)
        else:
            model = kind.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **given)
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    return LanguageModel(name, LogitsOf(model), tokenizer, int(config.vocab_size), positions)


def _built_in_config(name: str, length: int) -> Any:
    """Return the configuration behind builtin:SIZE: a GPT-2 without dropout that reads bytes."""
    width, layers, heads = SIZES[name.removeprefix(BUILTIN)]
    return transformers.GPT2Config(
        vocab_size=257, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=256,
        eos_token_id=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def write_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as transformers reads them, each file in one step."""
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        model.cpu().save_pretrained(temporary, safe_serialization=True)
        tokenizer.save_pretrained(temporary)
        for path in sorted(Path(temporary).iterdir()):
            files.replace(folder / path.name, lambda target, path=path: shutil.copyfile(path, target))


@contextmanager
def hub_errors(what: str, name: str) -> Iterator[None]:
    """Inside the block, errors of transformers become one line that names the model, and it shows no progress.

    what : what is loaded.
    """
    transformers.logging.disable_progress_bar()  # one for each file
    try:
        yield
    except FactoryError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:  # the last: a tokenizer without an end of a text
        raise SettingsError(
            f"{what} cannot be loaded", where=name, got=" ".join(str(error).split())[:200],
            wanted="a name at the Hugging Face hub that this machine reaches or has cached, or a folder with "
            "safetensors", next_step="check the name; without a network give a folder, or builtin:small",
        ) from error  # fmt: skip


# ---------------------------------------------------------------------- text to train on

Piece = tuple[str, bool]  # some text, and whether its document ends with it


@dataclass(frozen=True)
class TextSource:
    """Documents in a fixed order. fingerprint : hash of what they are. pieces : function that yields them."""

    fingerprint: str
    pieces: Callable[[], Iterator[Piece]]


def open_text(name: str, config: str = "", split: str = "train", column: str = "text") -> TextSource:
    """Open text by name: a file, a folder of files, gs://bucket/file, else a data set of the hub.

    A .txt file is one document; each row of a .parquet and each line of a .jsonl file is one.

    column : of the text in rows and lines. config, split : of the hub's data set.
    """
    path = fetch_file(name) if name.startswith("gs://") else Path(name).expanduser()
    paths = [path / entry for entry in files.names(path)] if files.is_folder(path) else [path]
    known = [one for one in paths if one.suffix.lower() in _KINDS]
    if known and all(files.is_file(one) for one in known):
        made_of = [column, *([one.name, files.sha256(one)] for one in known)]
        return TextSource(
            fingerprint_json(made_of)[:16], lambda: (piece for one in known for piece in _file(one, column))
        )
    if known or files.is_folder(path) or files.is_file(path):
        raise SettingsError("There is no such text", where=path, wanted=f"files {', '.join(_KINDS)}",
                            next_step="check the path of --dataset")  # fmt: skip
    return TextSource(
        fingerprint_json([name, config, split, column])[:16],
        lambda: _rows(name, column, name, config or None, split=split),
    )


def _file(path: Path, column: str) -> Iterator[Piece]:
    kind = _KINDS[path.suffix.lower()]
    if kind != "text":
        yield from _rows(path, column, kind, data_files=glob.escape(str(path)), split="train")
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        yield from ((line, False) for line in file)
    yield "", True


def _rows(where: object, column: str, *given: object, **more: object) -> Iterator[Piece]:
    """Yield the rows of a data set as `datasets.load_dataset` streams them: none is ever downloaded whole."""
    row = None
    try:
        for row in datasets.load_dataset(*given, **more, streaming=True):
            yield str(row[column] or ""), True
        if row is None:
            raise LookupError("no rows")
    except (OSError, ValueError, LookupError, RuntimeError, StopIteration) as error:  # the last: an empty .jsonl
        raise SettingsError(
            "The data set cannot be read", where=where, got=" ".join(repr(error).split())[:200],
            wanted=f"the column {column}; of the Hugging Face hub a data set with this split",
            next_step="check the name, --dataset_config and data.text_column; or give a .txt, .jsonl or .parquet",
        ) from error  # fmt: skip


# ---------------------------------------------------------------------- rows of tokens


def pack_tokens(
    source: TextSource, tokenizer: Tokenizer, length: int, folder: str | os.PathLike, *, most: int = 0
) -> np.ndarray:
    """Return the rows of `length` tokens of this source, int32 (N, T) on disk, made in `folder` unless they are there.

    Documents follow each other with the tokenizer's end in between, cut into rows that are never padded: tokens at the
    very end that do not fill a row are left out. Several processes that ask for the same rows wait for the first.

    most : tokens to read at most; 0 for all.
    Raises SettingsError where the text is shorter than one row.
    """
    path = Path(folder) / "tokens.npy"
    with file_lock(path.parent / "lock"):
        if not files.is_file(path):
            files.replace(path, lambda temporary: _write_rows(temporary, source, tokenizer, length, most))
    return open_rows(path)


def _write_rows(path: Path, source: TextSource, tokenizer: Tokenizer, length: int, most: int) -> None:
    count = 0
    with open(path, "wb") as file, progress_phase("tokenizing", None, of="tokens") as moved:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (0, length)})
        begin = file.tell()
        for tokens in _tokens_of(source, tokenizer):
            file.write(tokens.astype("<i4").tobytes())
            count += len(tokens)
            moved(len(tokens))
            if most and count >= most:
                break
        rows = min(count, most or count) // length
        file.truncate(begin + 4 * rows * length)
        file.seek(0)  # the length of a header does not depend on the number of rows
        np.lib.format.write_array_header_1_0(file, {"descr": "<i4", "fortran_order": False, "shape": (rows, length)})
    if not rows:
        raise SettingsError("The text is shorter than one sequence", got=f"{count} tokens",
            wanted=f"at least {length}", next_step="more text, or a smaller max_seq_length")  # fmt: skip


def _tokens_of(source: TextSource, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens of some documents at a time, with their ends."""
    pieces, end = source.pieces(), np.array([tokenizer.end], np.int32)
    while batch := list(islice(pieces, AT_ONCE)):
        found = zip(batch, tokenizer.encode([text for text, _ in batch]), strict=True)
        yield np.concatenate([part for (_, ends), tokens in found for part in ((tokens, end) if ends else (tokens,))])


def open_rows(path: Path, mode: str = "c") -> np.ndarray:
    """Open an array of rows on disk, read as it is used. Raises FileError for one that was cut off."""
    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)  # r+ would extend a file that was cut off
        return found if mode == "c" else np.load(path, mmap_mode=mode, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise FileError("These rows are damaged", where=path, got=" ".join(str(error).split())[:200],
                        next_step=f"delete {path.parent}: it is made again") from error  # fmt: skip
