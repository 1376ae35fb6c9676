"""Bundle: one file with all it takes to predict from raw bars, checked when it is loaded.

The file is a state (`storage.serialization`) with the bytes of another, and their SHA-256. The inner one has five
values: `description` (names, numbers and texts: settings of the data, facts of the run, certificate, metrics,
versions), `models` (name -> the bytes of the registered model), `graphs` (name -> the model's ONNX graph, or none),
`reference` (of the guard, or none) and `example` (bars with their predictions, which are made again and compared
when the bundle is loaded; or nothing). Loading runs no code of the file and imports nothing that it names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

import ml_factory
from ml_factory.data.quality import OFF_SHARE, ON_SHARE, off_tick_rows
from ml_factory.data.sessions import PRICES, TRADING_HOURS, MarketSpec
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import BarsError, CheckpointError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import feature_column_names
from ml_factory.features.custom import get_custom_feature
from ml_factory.inference.guard_reference import GuardReference
from ml_factory.inference.predict import FORMAT as MODEL_FORMAT
from ml_factory.inference.predict import (
    FittedModels,
    GraphModel,
    PredictionSpec,
    TrainedModel,
    add_prediction_splits,
)
from ml_factory.lazy_module import missing_package_error
from ml_factory.models.base import installed_library_versions
from ml_factory.models.registry import find_model_spec, registered_source_hash
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.serialization import deserialize_state, serialize_state

LARGEST_BUNDLE = 256 * 2**20  # bytes


def _libraries_of_models(names: Iterable[str]) -> list[str]:
    """Return the packages that these models predict with."""
    return sorted({"torch" if find_model_spec(name).windowed else name for name in names if name != "linear"})


def absent_libraries(names: Iterable[str]) -> list[str]:
    """Return the packages of these models that are not installed here."""
    return [name for name in _libraries_of_models(names) if name not in installed_library_versions((name,))]


def custom_feature_modules(spec: PredictionSpec) -> dict[str, dict[str, str]]:
    """Return the user's own features: name -> the module that defines it, and the hash of its source."""
    made = {name: get_custom_feature(name) for name in spec.features.custom}
    return {
        one.name: {"module": one.original.__module__, "hash": one.signature} for one in made.values()
    }  # fmt: skip


# ---- the checks ------------------------------------------------------------------------------------------------------


def _check_bundle_libraries(description: Mapping, where: object) -> None:
    """Raise SettingsError naming a library that is older here than where the bundle was made, MissingPackageError for
    one that is absent.
    """
    names = _libraries_of_models(description["models"])
    made_with = description["versions"]
    here = installed_library_versions(names) | {"ml_factory": ml_factory.__version__}
    for name in ("ml_factory", *names):
        if name not in here:
            raise missing_package_error(name)
        if _release(here[name]) < _release(made_with[name]):
            raise SettingsError(
                f"{name} is too old for this bundle", where=where, got=here[name], wanted=f"{made_with[name]} or newer",
                next_step=f"pip install --upgrade {name}",
            )  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def off_tick_share(bars: pd.DataFrame, market: MarketSpec) -> float:
    """Return the share of bars with a price that is no multiple of the market's tick; 0 where it has none."""
    return 0.0 if market.tick is None else off_tick_rows([bars[name] for name in PRICES], market.tick).mean()


def check_bars_on_tick(bars: pd.DataFrame, market: MarketSpec, share_of_training: float) -> None:
    """Raise BarsError for bars whose prices are not multiples of the tick, where those of training were.

    share_of_training : share of the bars of training with prices off the tick.
    """
    share = off_tick_share(bars, market)
    if share > OFF_SHARE and share_of_training <= ON_SHARE:
        raise BarsError(
            "These bars are on another tick than those the model was trained on", where=market.symbol,
            got=f"{share:.0%} of the bars off the tick of {market.tick:g}",
            wanted=f"prices that are multiples of {market.tick:g}",
            next_step=f"give the bars of {market.symbol} as they were traded, not adjusted, and in its units",
        )  # fmt: skip


_INTERVAL = ("log_loss", "gain_best", "gain_best_low", "gain_best_high")


def _model_card(about: Mapping) -> str:
    """Return the card in Markdown.

    about : the description of a bundle.
    """
    spec = about["spec"]
    market, labels = spec["market"], spec["data"]["labels"]
    parts = "".join(f"- base model: {name}\n" for name in about["models"]) if about["stack"] else ""
    own = ", ".join(f"{name} (module {one['module']}, source {one['hash']})" for name, one in about["custom"].items())
    steps = [str(one["step"] if isinstance(one, Mapping) else one) for one in spec["data"]["preprocess"]]
    tick = f"{market['tick']:g}" if market["tick"] is not None else "none"
    return "\n".join([
        f"# {about['model']} on {about['symbol']}, {about['horizon']} bars ahead", "",
        "Probabilities that the next move is short, neutral or long, from raw bars. " + (about["verdict"] or ""), "",
        "## What it reads", "",
        f"- raw bars of {market['bar_minutes']} min: {about['symbol']}, calendar {market['calendar']}, tick {tick}, "
        f"volume {'yes' if market['has_volume'] else 'no'}",
        f"- {len(about['feature_names'])} features; after a cold start it waits for {about['warmup_bars']:,} base bars",
        f"- your own features: {own or 'none'}",
        f"- preprocessing: {', '.join(steps)}, fitted on the training rows", "",
        "## What it was taught", "",
        f"- labels: {labels['kind']}, {about['horizon']} bars; classes {', '.join(map(str, about['classes']))}",
        f"- raw bars {about['raw']['first']} to {about['raw']['last']}; validation from "
        f"{about['split_times']['validation']}, test from {about['split_times']['test']}, labels until "
        f"{about['split_times']['last_label']}",
        f"- limits of the training: {_pairs(about['limited']) or 'none'}",
        f"- equal to the bit when trained again: {'no: ' + '; '.join(about['inexact']) if about['inexact'] else 'yes'}",
        parts,
        "## How good it is", "",
        *_metrics(about["metrics"]), "",
        "Log loss in nats a row; the gain is over the best baseline, with its 95 % interval. The validation rows were "
        "used to choose and to calibrate: only the test rows are out of sample.", "",
        "## Look-ahead", "", f"- certificate: {about['certified']}", "",
        "## Not for", "",
        "- another symbol, another tick, adjusted prices, bars of another length: loading or predicting refuses them",
        "- advice: the probabilities carry no costs, no position sizes and no promise", "",
        "## Fingerprints and versions", "",
        f"- run {about['run_id']}; data {about['data'][:12]}; raw bars {about['raw']['hash'][:12]}",
        *(f"- {name}: {digest[:12]}" for name, digest in about["models"].items()),
        f"- made with {_pairs(about['versions'])}", "",
        "## Use", "", "```python", "from ml_factory import Bundle", "",
        f"frame = Bundle.load({about['file']!r}).predict(bars)", "```", "",
    ]).replace("\n\n\n", "\n\n")  # fmt: skip


def _pairs(values: Mapping) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _metrics(rows: Sequence[Mapping]) -> list[str]:
    """Return the table of the metrics as Markdown."""
    lines = [
        "| split | forecast | log loss | gain | low | high | rows | effective |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [_number(row.get(name), "+.4f" if "gain" in name else ".4f") for name in _INTERVAL]
        counts = [_number(row.get(name), ",.0f") for name in ("rows", "effective_rows")]
        lines.append(f"| {' | '.join([row['split'], row['name'], *cells, *counts])} |")
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


FORMAT = "ml_factory.bundle/9"
_AGAIN = "export it again from the workspace (python -m ml_factory export), or copy the file again"


@dataclass(frozen=True)
class Bundle:
    """A finished model, or a stack with its base models, that predicts raw bars without a workspace.

    description : facts as JSON values, as `workflows.export` gathers them.
    models : name -> bytes of the state of a `TrainedModel`; of a stack those of its base models, in its order.
    graphs : name -> bytes of the model's ONNX graph, of all models or of none.
    reference : of the guard; None without one, then it checks no drift.
    example : of `make_example`; {} where a feature of the user's own refuses synthetic bars.
    where : the file it was read from.
    """

    description: Mapping
    models: Mapping[str, bytes]
    graphs: Mapping[str, bytes] = field(default_factory=dict)
    reference: GuardReference | None = None
    example: Mapping = field(default_factory=dict)
    where: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> "Bundle":
        """Read and check a file of `to_bytes`.

        Raises CheckpointError for a file that is no bundle or damaged, SettingsError for one that does not fit here:
        features or networks defined otherwise, other columns, other facts of the market, an older library;
        MissingPackageError where the library of its model is not installed; WorkspaceError for a file that is absent or
        larger than any bundle.
        """
        path = Path(path)
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
        with refuse_damaged_content(CheckpointError, "This bundle is damaged", where=path, next_step=_AGAIN):
            parts = deserialize_state(content)
            reference = parts["reference"] and GuardReference.from_state(parts["reference"])
            bundle = cls(**parts | {"reference": reference}, where=path)
            bundle.check()
        return bundle

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        parts = {name: getattr(self, name) for name in ("description", "models", "graphs", "example")}
        content = serialize_state(parts | {"reference": self.reference and self.reference.to_state()})
        return serialize_state({"format": FORMAT, "content": content, "sha256": sha256(content).hexdigest()})

    def check(self) -> None:
        """Check that this bundle can predict here, with these libraries and this library's features; as `load`."""
        if self.engine == "native":
            _check_bundle_libraries(self.description, self.where)
        for name, source in self.description["networks"].items():
            if (found := registered_source_hash(name)) != source:
                raise SettingsError(
                    f"The network {name} is not the one in this bundle", where=self.where, got=f"source {found}",
                    wanted=f"source {source}", next_step="register it as it was, before loading",
                )  # fmt: skip
        names = feature_column_names(self.spec.market, self.spec.features)
        for given in (self.description["feature_names"], *(one.feature_names for one in self.fitted.models.values())):
            if list(given) != names:
                other = ", ".join(sorted({*names} ^ {*given})[:5]) or "another order"
                raise SettingsError("The features of this bundle have other columns here", where=self.where, got=other,
                                    next_step="use the version it was made with")  # fmt: skip
        _ = [model.estimator for model in self.fitted.models.values()]
        if self.example:
            _check_example(self)

    @cached_property
    def spec(self) -> PredictionSpec:
        """Settings of the data: market, bars, features, labels."""
        return PredictionSpec.from_stored(self.description["spec"], self.where)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the description."""
        return fingerprint_json(self.description)

    @property
    def engine(self) -> str:
        """ "native", or "onnx" where a library of the models is not installed and the file holds their graphs."""
        return "onnx" if self.graphs and absent_libraries(self.models) else "native"

    @cached_property
    def fitted(self) -> FittedModels:
        """The models as they were registered, of a stack its base models; those that predict by their graph have a
        network's weights as bytes, so no library of theirs is needed.
        """
        native = self.engine == "native"
        models = {
            name: TrainedModel.from_state(deserialize_state(data, tensors=native), self.where)
            for name, data in self.models.items()
        }
        if not native:
            models = {name: GraphModel.of(one, self.graphs[name]) for name, one in models.items()}
        return FittedModels(models, self.description["stack"])

    @property
    def card(self) -> str:
        """The model card in Markdown."""
        return _model_card(self.description)

    def predict(self, bars: pd.DataFrame, *, all_rows: bool = False) -> pd.DataFrame:
        """Predict raw bars: the table of `pipeline.predict` on the same bars.

        bars : one row a bar, with a time column or index, open, high, low, close and, where the market has it, volume;
            as many before the first wanted row as the features need (`description["warmup_bars"]` base bars).
        all_rows : also rows that the model was fitted or chosen on.

        Raises BarsError for bars that are refused, or on another tick than those of training.
        """
        checked, _ = self.spec.check_bars(bars)
        check_bars_on_tick(checked, self.spec.market, self.description["off_tick"])
        table, _ = self.spec.predict_bars(checked, self.fitted)
        return add_prediction_splits(table, self.description, all_rows)


ROWS = 50
LARGEST_DIFFERENCE = 1e-5  # of a probability: other machines and versions of the libraries round otherwise


def _synthetic_example_bars(spec: PredictionSpec, warmup_bars: int) -> pd.DataFrame:
    """Return raw bars on the calendar and tick of these settings, some sessions more than the warm-up."""
    market = spec.market
    _, opens, closes = TRADING_HOURS[market.calendar]
    minutes = (warmup_bars + 1) * spec.features.base_minutes
    tick, days = market.tick or 0.25, 3 + minutes // (closes - opens)
    made = SyntheticSpec(days=days, calendar=market.calendar, tick=tick, price=20_000 * tick)
    bars = synthetic_market(made).bars
    rules = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    bars = bars.resample(f"{market.bar_minutes}min").agg(rules).dropna().rename_axis("timestamp")
    return bars if market.has_volume else bars.drop(columns="volume")


def make_example(bundle: Bundle) -> dict:
    """Return the bars and the bundle's newest predictions of them. Raises BarsError where a feature refuses them."""
    bars = _synthetic_example_bars(bundle.spec, bundle.description["warmup_bars"])
    known_at, p_N3 = _predict(bundle, bars)
    columns = {name: bars[name].to_numpy() for name in bars}
    return {"time": bars.index.as_unit("ns").asi8, "columns": columns, "known_at": known_at, "p": p_N3}


def _check_example(bundle: Bundle) -> None:
    """Raise SettingsError where the bundle predicts its example otherwise than when it was exported."""
    state, (known_at, p_N3) = bundle.example, _predict(bundle, example_bars(bundle))
    same = np.array_equal(known_at, state["known_at"])
    difference = float(np.abs(p_N3 - state["p"]).max()) if same else np.inf
    if not difference <= LARGEST_DIFFERENCE:
        got = f"probabilities that differ by {difference:.1e}" if same else "other rows"
        versions = bundle.description["versions"]
        raise SettingsError(
            "This bundle predicts its example otherwise here", where=bundle.where, got=got,
            wanted=f"those of ml_factory {versions['ml_factory']} within {LARGEST_DIFFERENCE:g}",
            next_step="use that version and its libraries, or prepare, train and export again",
        )  # fmt: skip


def example_bars(bundle: Bundle) -> pd.DataFrame:
    """Return the raw bars of the bundle's example."""
    index = pd.DatetimeIndex(bundle.example["time"].view("M8[ns]"), tz="UTC", name="timestamp")
    return pd.DataFrame(bundle.example["columns"], index=index)


def _predict(bundle: Bundle, bars: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return known_at int64 ns and probabilities float64 (rows, 3) of the newest rows."""
    table = bundle.predict(bars.reset_index(), all_rows=True).iloc[-ROWS:]
    return table.index.as_unit("ns").asi8, table[PROBABILITIES].to_numpy(np.float64)
