"""T5 that writes a text's label: network, loss, generation and evaluation.

B rows of a batch, T tokens of a text, L tokens of a label, V tokens of the vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.language.causal_lm import BUILTIN, drawn_from, hub_errors
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device
from ml_factory.training.evaluate import evaluate_mean_loss, evaluate_network_outputs

transformers, metrics, stats = LazyModule("transformers"), LazyModule("sklearn.metrics"), LazyModule("scipy.stats")

PAD, END = 0, 1
_PUBLISHED = {"d_kv": 64, "vocab_size": 32128}
# Sizes that are known without a file: of the built-in networks, and of those that Google published.
SIZES: dict[str, dict[str, int]] = {
    f"{BUILTIN}tiny": {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16},
    f"{BUILTIN}small": {"d_model": 128, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 32},
    "t5-small": {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, **_PUBLISHED},
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, **_PUBLISHED},
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, **_PUBLISHED},
}


class T5Network(nn.Module):
    """A T5 of transformers that returns its logits alone. model : T5ForConditionalGeneration."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, labels_BL: Tensor) -> Tensor:
        """Return logits (B, L, V) of each label's token, given the text and the label's earlier tokens."""
        earlier_BL = F.pad(labels_BL[:, :-1], (1, 0), value=PAD)  # T5 begins a text with padding
        return self.model(
            input_ids=tokens_BT, attention_mask=(tokens_BT != PAD).long(), decoder_input_ids=earlier_BL, use_cache=False
        ).logits


def t5_config(name: str, vocabulary: int = 0) -> Any:
    """Return the configuration of a T5: builtin:tiny or small, t5-small to t5-large, a folder or a name at the hub.

    vocabulary : number of tokens of a network that begins from scratch.
    """
    known = SIZES.get(name) or SIZES.get(name.removeprefix("google-t5/"))
    if known is not None:
        sizes = {**known, **({"vocab_size": vocabulary} if vocabulary else {})}
        return transformers.T5Config(**sizes, decoder_start_token_id=PAD)
    if name.startswith(BUILTIN):
        raise SettingsError("There is no such built-in T5", where="model", got=name,
                            wanted=", ".join(one for one in SIZES if one.startswith(BUILTIN)),
                            next_step=did_you_mean(name, SIZES))  # fmt: skip
    with hub_errors("The model", name):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "t5":
        raise SettingsError("This is no T5", where="model", got=f"{name}, a {config.model_type}", wanted="a T5")
    if vocabulary:
        config.vocab_size = vocabulary
    return config


def new_t5(config: Any, seed: int) -> T5Network:
    """Return a T5 whose weights depend on the seed alone."""
    with drawn_from(seed, "t5"):
        return T5Network(transformers.T5ForConditionalGeneration(config))


def load_t5(name: str) -> T5Network:
    """Return a trained T5 from a folder or the hub, safetensors only."""
    transformers.logging.disable_progress_bar()
    with hub_errors("The model", name):
        return T5Network(transformers.T5ForConditionalGeneration.from_pretrained(
            name, use_safetensors=True, dtype=torch.float32))  # fmt: skip


def label_loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
    """Return (sum of w * nats of a label's text, sum of w) of (tokens_BT, labels_BL, weight_B)."""
    tokens_BT, labels_BL, weight_B = batch
    labels_BL = labels_BL.long()
    logits_BLV = network(tokens_BT.long(), labels_BL).float()
    nats_BL = F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none") * (labels_BL != PAD)
    return (nats_BL.sum(1) * weight_B).sum(), weight_B.sum()


@torch.no_grad()
def write_labels(network: nn.Module, tokens_BT: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the label texts that a greedy search finds, (B, length), and their log probabilities (B,).

    Every step has the same shapes, so that a compiler builds one program a position.
    """
    model, mask_BT = network.model, (tokens_BT != PAD).long()
    encoded = model.encoder(input_ids=tokens_BT, attention_mask=mask_BT).last_hidden_state
    written = tokens_BT.new_full((len(tokens_BT), length + 1), PAD)
    ended_B = torch.zeros(len(tokens_BT), dtype=torch.bool, device=tokens_BT.device)
    score_B = encoded.new_zeros(len(tokens_BT), dtype=torch.float32)
    for at in range(length):
        logits_BV = model(
            encoder_outputs=(encoded,), attention_mask=mask_BT, decoder_input_ids=written[:, :length], use_cache=False
        ).logits[:, at].float()  # fmt: skip
        likely_B, token_B = torch.log_softmax(logits_BV, -1).max(-1)
        token_B = token_B.masked_fill(ended_B, PAD)  # a text that has ended stays as it is
        score_B = score_B + likely_B.masked_fill(ended_B, 0.0)
        written = written.index_copy(1, torch.tensor([at + 1], device=token_B.device), token_B[:, None])
        ended_B = ended_B | (token_B == END)
    return written[:, 1:], score_B


@dataclass(frozen=True)
class LabelTexts:
    """The tokens of each label, as the network writes them.

    labels : texts. tokens_CL : int32, ended by END and padded.
    """

    labels: tuple[str, ...]
    tokens_CL: np.ndarray

    @classmethod
    def of(cls, labels: tuple[str, ...], tokenizer: Any) -> "LabelTexts":
        """Return the tokens of these labels. Raises SettingsError where two are the same tokens."""
        ids = [tokenizer(label, add_special_tokens=False)["input_ids"] + [END] for label in labels]
        tokens_CL = np.full((len(labels), max(map(len, ids))), PAD, np.int32)
        for place, one in enumerate(ids):
            tokens_CL[place, : len(one)] = one
        if len(np.unique(tokens_CL, axis=0)) < len(labels):
            raise SettingsError("Two labels are the same to the tokenizer", where="Label", got=", ".join(labels)[:100],
                                next_step="name them in letters that the training texts have")  # fmt: skip
        return cls(labels, tokens_CL)

    def rows(self, labels: tuple[str, ...]) -> np.ndarray:
        """Return the tokens (N, L) of these labels."""
        number = {label: at for at, label in enumerate(self.labels)}
        return self.tokens_CL[[number[label] for label in labels]]

    def read(self, written_NL: np.ndarray, tokenizer: Any) -> list[str]:
        """Return the labels of these tokens; a text that is no label is returned as it is."""
        known = {row.tobytes(): label for row, label in zip(self.tokens_CL, self.labels, strict=True)}
        return [
            known.get(np.ascontiguousarray(row, np.int32).tobytes()) or tokenizer.decode(row, skip_special_tokens=True)
            for row in written_NL
        ]


def mean_label_loss(network: nn.Module, rows: BatchLoader, device: Device, size: int) -> float:
    """Return the mean nats of a label's text over all rows."""
    return evaluate_mean_loss(network, rows, label_loss, device, size)


def predict_labels(
    network: nn.Module, rows: BatchLoader, device: Device, size: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the written tokens (N, L) and log probabilities (N,) of all rows."""

    def forward(network: nn.Module, batch: tuple) -> Tensor:
        written_BL, score_B = write_labels(network, batch[0].long(), length)
        return torch.cat([written_BL.double(), score_B[:, None].double()], 1)

    out = evaluate_network_outputs(network, rows, device, size, forward).double().numpy()
    return out[:, :length].astype(np.int32), out[:, length]


def score_labels(truth: list[str], predicted: list[str]) -> dict[str, Any]:
    """Return accuracy with its 95 % interval, and macro F1."""
    right = sum(one == other for one, other in zip(truth, predicted, strict=True))
    return {"accuracy": right / len(truth), "interval": share_interval(right, len(truth)), "rows": len(truth),
            "macro_f1": float(metrics.f1_score(truth, predicted, average="macro", zero_division=0))}  # fmt: skip


def share_interval(right: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), for rows that are independent."""
    found = stats.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def save_t5(network: T5Network, tokenizer: Any, folder: Path) -> None:
    """Write network and tokenizer as transformers reads them."""
    network.model.cpu().save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))
