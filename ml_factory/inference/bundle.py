"""Bundle: one file with all it takes to predict from raw bars, checked when it is loaded.

The file is a state (`storage.serialization`) with the bytes of another, and their SHA-256. The inner one has five
values: `description` (names, numbers and texts: settings of the data, facts of the run, certificate, metrics,
versions), `models` (name -> the bytes of the registered model), `graphs` (name -> the model's ONNX graph, or none),
`reference` (of the guard, or nothing) and `example` (bars with their predictions, which are made again and compared
when the bundle is loaded; or nothing). Loading runs no code of the file and imports nothing that it names.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import pandas as pd

from ml_factory.data.resample import resample_bars
from ml_factory.data.validation import RawBarSpec
from ml_factory.errors import BarsError, CheckpointError, refuse_damaged_content
from ml_factory.inference.bundle_checks import (
    LARGEST_BUNDLE,
    absent_libraries,
    check_bars_on_tick,
    check_bundle_certificate,
    check_bundle_description,
    check_bundle_features,
    check_bundle_libraries,
)
from ml_factory.inference.example import check_example
from ml_factory.inference.graph_model import GraphModel
from ml_factory.inference.guard_reference import GuardReference
from ml_factory.inference.model_card import model_card
from ml_factory.inference.predict import FittedModels
from ml_factory.inference.prediction_spec import PredictionSpec
from ml_factory.inference.split_times import add_prediction_splits
from ml_factory.inference.trained_model import FORMAT as MODEL_FORMAT
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.storage.files import files
from ml_factory.storage.serialization import deserialize_state, serialize_state

FORMAT = "ml_factory.bundle/5"
_PARTS = {"description": dict, "models": dict, "graphs": dict, "reference": bytes, "example": bytes}
_AGAIN = "export it again from the workspace (python -m ml_factory export), or copy the file again"


@dataclass(frozen=True)
class Bundle:
    """A finished model, or a stack with its base models, that predicts raw bars without a workspace.

    description : facts as JSON values, as `workflows.export` gathers them.
    models : name -> bytes of the state of a `TrainedModel`; of a stack those of its base models, in its order.
    graphs : name -> bytes of the model's ONNX graph, of all models or of none.
    reference : bytes of the `GuardReference`; b"" without one, then the guard checks no drift.
    example : bytes of `example.make_example`; b"" where a feature of the user's own refuses synthetic bars.
    where : the file it was read from.
    """

    description: Mapping
    models: Mapping[str, bytes]
    graphs: Mapping[str, bytes] = field(default_factory=dict)
    reference: bytes = b""
    example: bytes = b""
    where: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> "Bundle":
        """Read and check the file of `save`.

        Raises CheckpointError for a file that is no bundle or damaged, SettingsError for one that does not fit here:
        features defined otherwise, other facts of the market, an older library; MissingPackageError where the library
        of its model is not installed; WorkspaceError for a file that is absent or larger than any bundle.
        """
        path = Path(path)
        bundle = cls(**_read(path), where=path)
        bundle.check()
        return bundle

    def save(self, path: str | Path) -> Path:
        """Write the bundle to one file, whole or not at all."""
        files.write(path, self.to_bytes())
        return Path(path)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        content = serialize_state({name: getattr(self, name) for name in _PARTS})
        return serialize_state({"format": FORMAT, "content": content, "sha256": sha256(content).hexdigest()})

    def check(self) -> None:
        """Check that this bundle can predict here, with these libraries and this library's features; as `load`."""
        with _damaged(self.where):
            check_bundle_description(self.description, self.where)
            check_bundle_certificate(self.description, self.where)
            if self.engine == "native":
                check_bundle_libraries(self.description, self.where)
            check_bundle_features(self.description, self.spec, self.where)
            _ = [model.estimator for model in self.fitted.models.values()]
            if self.example:
                check_example(self)
        _ = self.guard_reference

    @cached_property
    def spec(self) -> PredictionSpec:
        """Settings of the data: market, bars, features, labels."""
        return PredictionSpec.from_stored(self.description["spec"], self.where)

    @cached_property
    def guard_reference(self) -> GuardReference | None:
        """The look of the training rows; None in a bundle without it. Raises CheckpointError for a damaged one."""
        if not self.reference:
            return None
        return GuardReference.from_bytes(self.reference, self.where)

    @property
    def off_tick_share(self) -> float:
        """Share of the bars of training with prices off the tick; of all bars in a bundle without reference."""
        limits = self.guard_reference.limits if self.guard_reference else {}
        return limits.get("off_tick", self.description["off_tick"])

    @property
    def engine(self) -> str:
        """ "native", or "onnx" where a library of the models is not installed and the file holds their graphs."""
        return "onnx" if self.graphs and absent_libraries(self.models) else "native"

    @cached_property
    def fitted(self) -> FittedModels:
        """The models, ready to predict feature rows."""
        return FittedModels(self.trained, self.description["stack"])

    @cached_property
    def trained(self) -> dict[str, TrainedModel]:
        """The models as they were registered, of a stack its base models; those that predict by their graph have a
        network's weights as bytes, so no library of theirs is needed.
        """
        if self.engine == "native":
            return {name: _read_model(name, data, True, self.where) for name, data in self.models.items()}
        return {
            name: GraphModel.of(_read_model(name, data, False, self.where), self.graphs[name])
            for name, data in self.models.items()
        }

    @property
    def card(self) -> str:
        """The model card in Markdown."""
        with _damaged(self.where):
            return model_card(self.description)

    def predict(
        self, bars: pd.DataFrame, *, stamped: RawBarSpec | None = None, all_rows: bool = False, warm_rows: bool = False
    ) -> pd.DataFrame:
        """Predict raw bars: the frame of `pipeline.predict` on the same bars.

        bars : one row a bar, with a time column or index, open, high, low, close and, where the market has it, volume;
            as many before the first wanted row as the features need (`description["warmup_bars"]` base bars).
        stamped : format of these bars; None: that of the bars of training.
        all_rows : also rows that the model was fitted or chosen on.
        warm_rows : only rows with as many before them as the features need.

        Raises BarsError for bars that are refused, too few, or on another tick than those of training.
        """
        checked, _ = self.spec.check_bars(bars, stamped=stamped)
        check_bars_on_tick(checked, self.spec.market, self.off_tick_share)
        first = self._first_warm_moment(checked) if warm_rows else None
        frame, _ = self.spec.predict_bars(checked, self.fitted)
        if first is not None:
            frame = frame[frame.index.as_unit("ns").asi8 >= first]
            if not len(frame):
                raise BarsError("No row of these bars can be predicted", where="bars", got=f"{len(checked):,} bars",
                                wanted="a row after the warm-up with its whole window in one session",
                                next_step="give more bars before the first wanted row")  # fmt: skip
        with _damaged(self.where):
            return add_prediction_splits(frame, self.description, all_rows, self.where)

    def _first_warm_moment(self, checked: pd.DataFrame) -> int:
        """Return from when on rows have the warm-up before them, UTC ns.

        Raises BarsError for too few bars, before anything else is computed.
        """
        wanted, length = self.description["warmup_bars"], self.spec.features.base_minutes
        known_at = resample_bars(checked, self.spec.market, length).known_at
        if len(known_at) <= wanted:
            raw = (wanted + 1) * max(length // self.spec.market.bar_minutes, 1)
            raise BarsError(
                "Too few bars for a prediction", where="bars", got=f"{len(known_at):,} bars of {length} minutes",
                wanted=f"at least {wanted + 1:,}, that is {raw:,} raw bars without gaps",
                next_step="give as many before the first wanted row as the features need",
            )  # fmt: skip
        return int(known_at[wanted])


def _read_model(name: str, data: bytes, tensors: bool, where: object) -> TrainedModel:
    try:
        state = deserialize_state(data, tensors=tensors)
    except CheckpointError as error:
        raise CheckpointError(
            f"The model {name} in this bundle is damaged", where=where, got=error.got, next_step=_AGAIN
        ) from error
    return TrainedModel.from_state(state, where)


def _damaged(where: object) -> AbstractContextManager:
    """Raise CheckpointError where the values in the file are not those that are read."""
    return refuse_damaged_content(CheckpointError, "This bundle is damaged", where=where, next_step=_AGAIN)


def _read(path: Path) -> dict:
    """Return the state in the file, its parts present and of their types."""
    data = files.read(path, LARGEST_BUNDLE)
    try:
        state = deserialize_state(data)
    except CheckpointError as error:
        raise CheckpointError("This file is no bundle, or it is cut short", where=path, got=error.got,
                              next_step=_AGAIN) from error  # fmt: skip
    if state.get("format") != FORMAT:
        model = state.get("format") == MODEL_FORMAT
        raise CheckpointError(
            "Not a bundle of this version", where=path, wanted=FORMAT,
            got="a registered model, which predicts feature rows" if model else str(state.get("format"))[:60],
            next_step="python -m ml_factory export writes one from the workspace",
        )  # fmt: skip
    content = state.get("content")
    if not isinstance(content, bytes) or sha256(content).hexdigest() != state.get("sha256"):
        raise CheckpointError("This bundle was changed, or is damaged", where=path, got="another SHA-256",
                              wanted=str(state.get("sha256"))[:12], next_step=_AGAIN)  # fmt: skip
    with _damaged(path):
        parts = deserialize_state(content)
        wrong = [name for name, kind in _PARTS.items() if not isinstance(parts[name], kind)]
        if wrong or not all(isinstance(one, bytes) for name in ("models", "graphs") for one in parts[name].values()):
            raise ValueError(f"no {', '.join(wrong or ['bytes of a model'])}")
        return {name: parts[name] for name in _PARTS}
