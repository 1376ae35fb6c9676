"""A finished network of a market, to be compressed."""

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.errors import SettingsError
from ml_factory.evaluation.baselines import prior_baseline_probabilities
from ml_factory.evaluation.intervals import gain_interval
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.models.registry import find_model_spec
from ml_factory.recipes.compression.pruning import kept_count, load_sliced, prune_encoder_state, prune_recurrent_state
from ml_factory.recipes.compression.variant_file import Architecture
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device
from ml_factory.training.estimator import init_network_from_seed
from ml_factory.training.evaluate import evaluate_mean_loss, evaluate_network_outputs
from ml_factory.training.losses import weighted_cross_entropy
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.predictions import find_artifact_to_predict
from ml_factory.workflows.prepared_dataset import dataset_input_reader, dataset_sample_weights

CLASSES = 3
_WIDTHS = ("width", "inner", "hidden")  # settings of networks that a student has less of


class MarketSubject:
    """The newest finished network of this name, symbol and horizon, on its own prepared data."""

    quality = "gain over the class prior (nats)"

    def __init__(self, workspace: Workspace, symbol: str, horizon: int, model: str, device: Device):
        if not find_model_spec(model).windowed:
            raise SettingsError("Only networks are compressed", where="model", got=model, wanted="a network")
        data = load_dataset(workspace, symbol, horizon)
        artifact = find_artifact_to_predict(workspace, symbol, horizon, model, data=data.fingerprint)
        self.estimator = TrainedModel.from_state(artifact.load_state()).estimator
        self.name, self.device, self.training = f"{symbol}-h{horizon}-{model}", device, self.estimator.settings
        self.network, self._spec = self.estimator.network, self.estimator.network_spec
        self.architecture = asdict(self._spec)
        read = dataset_input_reader(data, data.scaler, self.estimator)
        full = data.full_window_mask(self.estimator.lookback)
        rows = {name: data.splits[name][full[data.splits[name]]] for name in ("train", "validation", "test")}
        clear = data.unambiguous_mask
        rows["test"] = rows["test"][clear[rows["test"]]]
        self._loaders = {name: self._loader(read, data, positions) for name, positions in rows.items()}
        self.feed = self._loaders["train"]
        counted = data.y[rows["train"][clear[rows["train"]]]]
        prior_N3 = prior_baseline_probabilities(counted, None, len(rows["test"]))
        truth = data.y[rows["test"]].astype(np.int64) + 1
        self._prior_N, self._truth_N = np.log(prior_N3[np.arange(len(truth)), truth]), truth
        self._horizon, self._times_N = horizon, data.labels.index[rows["test"]]
        self.fingerprint = fingerprint_json([self.name, artifact.facts["run_id"], data.fingerprint])[:16]

    def _loader(self, read: Callable, data: object, positions: np.ndarray) -> BatchLoader:
        weights = dataset_sample_weights(data, positions)
        parts = self.estimator._parts(read(positions), data.y[positions], weights, "rows")
        if self.estimator.offset is not None:
            clock = self.estimator._clock(parts[0])
            scores = self.estimator.offset.log_class_shares(clock).astype(np.float32)
            parts = (*parts[:-2], scores, *parts[-2:])
        return BatchLoader(self.device, parts)

    def build(self, architecture: Architecture) -> nn.Module:
        spec = type(self._spec)(**{
            name: tuple(value) if isinstance(value, list) else value for name, value in architecture.items()
        })  # fmt: skip
        estimator = self.estimator
        return init_network_from_seed(
            estimator.name, estimator.kind, estimator.features, estimator.lookback, CLASSES, spec, self.training.seed
        )

    def remove(self, share: float) -> tuple[nn.Module, Architecture]:
        state, sizes = self.network.state_dict(), dict(self.architecture)
        if any(name.endswith("feed.0.weight") for name in state):
            sizes["inner"] = kept_count(self._spec.inner, share)
            state = prune_encoder_state(state, sizes["inner"])
        elif "rnn.weight_hh_l0" in state:
            sizes["hidden"] = kept_count(self._spec.hidden, share)
            state = prune_recurrent_state(state, self._spec.hidden, sizes["hidden"])
        else:
            raise SettingsError("This network has nothing to remove whole", where="methods", got=self.name,
                                wanted="magnitude, int8_dynamic, int8_weights or distill")  # fmt: skip
        return load_sliced(self.build(sizes), state), sizes

    def smaller(self, share: float) -> Architecture:
        heads = self.architecture.get("heads", 1)
        sizes = {name: max(kept_count(self.architecture[name], share) // heads, 1) * heads
                 for name in _WIDTHS if isinstance(self.architecture.get(name), int)}  # fmt: skip
        if not sizes:
            raise SettingsError("This network has no width to make smaller", where="methods", got=self.name)
        return {**self.architecture, **asdict(replace(self._spec, **sizes))}

    def loss(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        logits_BC, weight_B = self.logits(network, batch)
        return weighted_cross_entropy(logits_BC, batch[-2], weight_B)

    def logits(self, network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        *inputs, _, weight_B = batch
        logits_BC = network(inputs[0]).float()
        return (logits_BC + inputs[-1] if self.estimator.offset is not None else logits_BC), weight_B

    def validation_loss(self, network: nn.Module) -> float:
        return evaluate_mean_loss(
            network, self._loaders["validation"], self.loss, self.device, self.training.eval_batch
        )

    def outcomes(self, network: nn.Module) -> np.ndarray:
        def forward(network: nn.Module, batch: tuple) -> Tensor:
            return self.logits(network, batch)[0]

        logits_NC = evaluate_network_outputs(
            network, self._loaders["test"], self.device, self.training.eval_batch, forward
        )
        scores_NC = F.log_softmax(logits_NC.double(), 1).numpy()
        return scores_NC[np.arange(len(scores_NC)), self._truth_N] - self._prior_N

    def interval(self, outcomes_N: np.ndarray) -> tuple[float, float]:
        found = gain_interval(outcomes_N, horizon=self._horizon, times_N=self._times_N)
        return found.low, found.high

    def one_prediction(self) -> Callable[[nn.Module], object]:
        with torch.no_grad():
            batch = tuple(part.cpu() for part in self._loaders["test"](np.array([0])))
        return lambda network: network(batch[0])
