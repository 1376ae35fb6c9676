"""A T5 that recipe t5 trained, to be compressed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.compression.pruning import kept_count, load_sliced, prune_t5_state
from ml_factory.recipes.compression.variant_file import Architecture
from ml_factory.recipes.t5 import (
    PAD,
    label_loss,
    load_t5,
    mean_label_loss,
    new_t5,
    predict_labels,
    share_interval,
    write_labels,
)
from ml_factory.recipes.t5_run import NAME, T5ModelSettings, T5Settings, TextFiles, prepare_texts, read_parts
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.training.device import Device
from ml_factory.training.spec import TrainSpec

transformers = LazyModule("transformers")
_SIZES = ("d_model", "d_ff", "d_kv", "num_layers", "num_decoder_layers", "num_heads", "vocab_size")


class T5Subject:
    """What `compress_run` asks of a trained network, for a T5; MarketSubject has the same members.

    folder : of the finished run. facts : its result.

    name, fingerprint : of the network; a hash of weights and data. network, architecture : the trained one, and what
    `build` makes it from. training, device : of its training. feed : training rows. quality : name of the figure.
    build : a network of an architecture, its weights a function of the seed. remove : a network without this share of
    its heads and inner units, and its architecture. smaller : the architecture of a student that is narrower by it.
    loss : (sum of w * loss, sum of w) of a batch. logits : (logits (M, C), weights (M,)) of its M predictions.
    outcomes, interval : quality of each test row, float64 (N,), and the 95 % interval of its mean.
    one_prediction : a function that predicts one test row on the CPU.
    """

    quality = "accuracy"

    def __init__(self, folder: Path, facts: Mapping[str, Any], device: Device):
        given = facts["settings"]
        settings = T5Settings(TextFiles(**given["files"]), T5ModelSettings(**given["model"]),
                              TrainSpec(**given["training"]))  # fmt: skip
        self.name, self.training, self.device = NAME, settings.training, device
        self.data = prepare_texts(settings, read_parts(settings.files, settings.training.seed), device)
        if self.data.fingerprint != facts["data"]:
            raise SettingsError("The texts are no longer those of the training", where=folder,
                                got=self.data.fingerprint, wanted=facts["data"], next_step="train again")  # fmt: skip
        self.network = load_t5(str(folder / "model"))
        self._config = self.network.model.config
        self.architecture = {name: int(getattr(self._config, name)) for name in _SIZES}
        self.feed = self.data.rows["train"]
        weights = files.sha256(folder / "model" / "model.safetensors")
        self.fingerprint = fingerprint_json([NAME, weights, self.data.fingerprint])[:16]

    def build(self, architecture: Architecture) -> nn.Module:
        given = {**self._config.to_dict(), **architecture}
        return new_t5(transformers.T5Config(**given), self.training.seed)

    def remove(self, share: float) -> tuple[nn.Module, Architecture]:
        sizes = dict(self.architecture)
        heads, inner = (kept_count(sizes[name], share) for name in ("num_heads", "d_ff"))
        state = prune_t5_state(self.network.model.state_dict(), sizes["num_heads"], sizes["d_kv"], heads, inner)
        sizes |= {"num_heads": heads, "d_ff": inner}
        smaller = self.build(sizes)
        load_sliced(smaller.model, state)
        return smaller, sizes

    def smaller(self, share: float) -> Architecture:
        sizes = dict(self.architecture)
        for name in ("d_model", "d_ff", "d_kv", "num_layers", "num_decoder_layers"):
            sizes[name] = kept_count(sizes[name], share)
        return sizes

    def loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        return label_loss(network, batch)

    def logits(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        tokens_BT, labels_BL, weight_B = batch
        logits_BLV = network(tokens_BT.long(), labels_BL.long())
        return logits_BLV.flatten(0, 1), ((labels_BL != PAD) * weight_B[:, None]).flatten()

    def validation_loss(self, network: nn.Module) -> float:
        return mean_label_loss(network, self.data.rows["validation"], self.device, self.training.eval_batch)

    def outcomes(self, network: nn.Module) -> np.ndarray:
        length = self.data.targets.tokens_CL.shape[1]
        written, _ = predict_labels(network, self.data.rows["test"], self.device, self.training.eval_batch, length)
        labels = self.data.targets.read(written, self.data.tokenizer)
        truth = self.data.parts["test"].labels
        return np.array([one == other for one, other in zip(truth, labels, strict=True)], np.float64)

    def interval(self, outcomes_N: np.ndarray) -> tuple[float, float]:
        return share_interval(round(outcomes_N.sum()), len(outcomes_N))

    def one_prediction(self) -> Callable[[nn.Module], object]:
        rows = self.data.rows["test"]
        tokens_BT = rows(np.array([len(rows) // 2]))[0].long().cpu()
        length = self.data.targets.tokens_CL.shape[1]
        return lambda network: write_labels(network, tokens_BT, length)
