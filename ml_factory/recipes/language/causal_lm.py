"""Causal language models: a small one that is built in, and any of Hugging Face by name or path.

B sequences, T positions, D width, V tokens of the vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.language.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, hub_errors
from ml_factory.seeding import derive_seed
from ml_factory.storage.files import files
from ml_factory.storage.serialization import read_state_file, write_state_file

transformers = LazyModule("transformers")

BUILTIN = "builtin:"
STATE_FILE = "model.state"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SmallCausalSpec:
    """Sizes of the built-in model. vocabulary : number of tokens. positions : longest sequence."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    vocabulary: int = 257
    positions: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or not 1 <= value <= 1 << 20:
                raise SettingsError("Cannot build the language model", where=name, got=repr(value), wanted="1 or more")
        if self.width % self.heads:
            raise SettingsError("Cannot build the language model", where="heads", got=self.heads,
                                wanted=f"a divisor of {self.width}")  # fmt: skip


SIZES = {
    "tiny": SmallCausalSpec(64, 2, 2),
    "small": SmallCausalSpec(128, 4, 4),
    "medium": SmallCausalSpec(256, 6, 8),
}


class _Block(nn.Module):
    """Attention to earlier positions, and a feed-forward part, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.read(self.norm(x_BTD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x_BTD = x_BTD + self.write(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.inner(self.norm_inner(x_BTD))


class SmallCausalModel(nn.Module):
    """A decoder-only transformer in the manner of GPT-2: learned positions, output tied to the embedding."""

    def __init__(self, spec: SmallCausalSpec):
        super().__init__()
        self.spec = spec
        self.embed, self.position = nn.Embedding(spec.vocabulary, spec.width), nn.Embedding(spec.positions, spec.width)
        self.blocks = nn.ModuleList(_Block(spec.width, spec.heads) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.embed.weight)


class HuggingFaceModel(nn.Module):
    """A causal model of transformers that returns its logits alone."""

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
    write : writes the model into a folder, in its own format.
    """

    name: str
    network: nn.Module
    tokenizer: Tokenizer
    vocabulary: int
    positions: int
    write: Callable[[Path], None]

    def check(self, length: int) -> "LanguageModel":
        """Return self after a forward pass on the host. Raises SettingsError where model and tokenizer do not fit."""
        if self.positions and length > self.positions:
            raise SettingsError("The model reads shorter sequences", where=self.name, got=f"max_seq_length {length}",
                                wanted=f"at most {self.positions}")  # fmt: skip
        if 1 + max(self.tokenizer.vocabulary.values()) > self.vocabulary:
            raise SettingsError(
                "The tokenizer has tokens that the model lacks", where=self.name,
                got=f"{1 + max(self.tokenizer.vocabulary.values()):,} tokens", wanted=f"at most {self.vocabulary:,}",
            )  # fmt: skip
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
    """Load a causal model: builtin:tiny, small or medium; a folder that this recipe wrote; else of Hugging Face.

    length : longest sequence, of a built-in model that is not stored yet.
    seed : of the first weights, where they are random: always for a built-in one, else with `from_scratch`.
    dtype : of the weights.
    """
    if name.startswith(BUILTIN):
        return _built_in(name, _spec_of(name, length), seed, dtype)
    if files.is_file(Path(name) / STATE_FILE):
        return _stored(name, dtype, None if not from_scratch else seed)
    transformers.logging.disable_progress_bar()  # one for each loaded file
    with hub_errors("The model", name):
        kind, given = transformers.AutoModelForCausalLM, {"dtype": DTYPES[dtype]}
        if from_scratch:
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            with drawn_from(seed, name):
                model = kind.from_config(config, **given)
        else:
            model = kind.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **given)
    tokenizer = HuggingFaceTokenizer(name)

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder), safe_serialization=True)
        tokenizer.save(folder)

    positions = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    return LanguageModel(name, HuggingFaceModel(model), tokenizer, int(model.config.vocab_size), positions, write)


def _spec_of(name: str, length: int) -> SmallCausalSpec:
    """Return the sizes behind builtin:SIZE."""
    size = name.removeprefix(BUILTIN)
    if size not in SIZES:
        raise SettingsError("There is no such built-in model", where=name, got=size, wanted=", ".join(SIZES),
                            next_step=did_you_mean(size, SIZES))  # fmt: skip
    return SmallCausalSpec(**{**asdict(SIZES[size]), "positions": length})


def _built_in(name: str, spec: SmallCausalSpec, seed: int | None, dtype: str) -> LanguageModel:
    with drawn_from(seed or 0, "small causal model"):
        network = SmallCausalModel(spec).to(DTYPES[dtype])

    def write(folder: Path) -> None:
        state = {"kind": "small causal model", "spec": asdict(spec)}
        weights = {name: value.detach().float().cpu() for name, value in network.state_dict().items()}
        write_state_file(folder / STATE_FILE, {**state, "weights": weights})

    return LanguageModel(name, network, ByteTokenizer(), spec.vocabulary, spec.positions, write)


def _stored(name: str, dtype: str, seed: int | None) -> LanguageModel:
    """Load a built-in model from a folder; with a seed only its sizes."""
    path = Path(name) / STATE_FILE
    state: dict[str, Any] = read_state_file(path)
    try:
        if state["kind"] != "small causal model":
            raise ValueError(state["kind"])
        model = _built_in(name, SmallCausalSpec(**state["spec"]), seed, dtype)
        if seed is None:
            model.network.load_state_dict(state["weights"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SettingsError("This is no model of recipe sdce", where=path, got=repr(error)[:200],
                            next_step="give the folder `model` that recipe sdce wrote") from error  # fmt: skip
    return model


@contextmanager
def drawn_from(seed: int, name: str) -> Iterator[None]:
    """Inside the block random numbers come from the seed and a name; afterwards the caller's go on."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, Path(name).name, "init"))
        yield
