"""Causal language models of transformers with their tokenizers: small ones that are built in, and any by name or path.

B sequences, T positions, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.run import drawn_from
from ml_factory.storage.json_values import fingerprint_json

transformers, tokenizers = LazyModule("transformers"), LazyModule("tokenizers")
slow_tokenizers = LazyModule("transformers.convert_slow_tokenizer")

BUILTIN, END_OF_TEXT = "builtin:", "<|endoftext|>"
SIZES = {"tiny": (64, 2, 2), "small": (128, 4, 4), "medium": (256, 6, 8)}  # width, layers, heads of a GPT-2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Tokenizer:
    """A tokenizer of transformers.

    inner : the tokenizer itself.
    vocabulary : token string -> id.
    specials : token strings that stand for no text, such as the end of a text.
    end : id of the end of a text.
    fingerprint : hash of what decides the ids.
    """

    def __init__(self, inner: Any, name: str):
        if inner.eos_token_id is None:
            raise SettingsError("The tokenizer has no token for the end of a text", where=name,
                                next_step="use a tokenizer with an eos_token")  # fmt: skip
        self.inner, self.end = inner, int(inner.eos_token_id)
        self.vocabulary, self.specials = dict(inner.get_vocab()), frozenset(inner.all_special_tokens)
        backend = getattr(inner, "backend_tokenizer", None)
        self.fingerprint = fingerprint_json(backend.to_str() if backend is not None else self.vocabulary)[:16]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return int32 ids of each text, without special tokens."""
        # The tokenizer's own limit on lengths does not matter: texts are cut into sequences afterwards.
        ids = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(one, np.int32) for one in ids["input_ids"]]


def byte_tokenizer() -> Tokenizer:
    """Return the built-in tokenizer: a token for each byte of UTF-8, spelt as in GPT-2, and the end of a text."""
    spelt = slow_tokenizers.bytes_to_unicode()
    tokens = [*(spelt[byte] for byte in range(256)), END_OF_TEXT]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END_OF_TEXT), "bytes")


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

    def write(self, folder: Path) -> None:
        """Write model and tokenizer into a folder that transformers reads."""
        write_pretrained(self.network.model, self.tokenizer.inner, folder)

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
            tokenizer = Tokenizer(inner, name)
        if from_scratch or name.startswith(BUILTIN):
            with drawn_from(seed, name):
                model = kind.from_config(config, **given)
        else:
            model = kind.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **given)
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    return LanguageModel(name, LogitsOf(model), tokenizer, int(config.vocab_size), positions)


def _built_in_config(name: str, length: int) -> Any:
    """Return the configuration behind builtin:SIZE: a GPT-2 without dropout that reads bytes."""
    size = name.removeprefix(BUILTIN)
    if size not in SIZES:
        raise SettingsError("There is no such built-in model", where=name, got=size, wanted=", ".join(SIZES),
                            next_step=did_you_mean(size, SIZES))  # fmt: skip
    width, layers, heads = SIZES[size]
    return transformers.GPT2Config(
        vocab_size=257, n_positions=length, n_embd=width, n_layer=layers, n_head=heads, bos_token_id=256,
        eos_token_id=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def write_pretrained(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer as transformers reads them."""
    transformers.logging.disable_progress_bar()
    model.cpu().save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))


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
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(
            f"{what} cannot be loaded", where=name, got=" ".join(str(error).split())[:200],
            wanted="a name at the Hugging Face hub that this machine reaches or has cached, or a folder with "
            "safetensors", next_step="check the name; without a network give a folder, or builtin:small",
        ) from error  # fmt: skip
