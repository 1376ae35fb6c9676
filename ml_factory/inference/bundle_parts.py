"""Checks that the parts of a bundle belong together: its models, and what its description and its card report."""

import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import pandas as pd

from ml_factory.ensemble.stacking import Stack
from ml_factory.errors import CheckpointError
from ml_factory.evaluation.calibration import Calibration
from ml_factory.inference.prediction_spec import PredictionSpec
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.storage.workspace import check_symbol
from ml_factory.targets.labels import stored_label_classes

UNCERTIFIED = "none: uncertified"
_NAME = re.compile(r"[A-Za-z0-9_.+-]{1,200}")  # of a run or a file, not of a folder
_NUMBERS = (
    "log_loss", "accuracy", "gain_best", "gain_best_low", "gain_best_high", "direction_gain", "direction_low", "rows",
    "effective_rows",
)  # fmt: skip


def warmup_bars(spec: PredictionSpec, models: Mapping[str, TrainedModel]) -> int:
    """Return base bars after which a cold start predicts."""
    return spec.features.warmup_bars + max(model.lookback for model in models.values())


def check_bundle_parts(
    description: Mapping, spec: PredictionSpec, models: Mapping[str, TrainedModel], where: object
) -> None:
    """Raise CheckpointError naming the first fact in the description that is not that of the models, or is none."""
    facts, settings = description, description["spec"]
    for name, model in models.items():
        _require(f"the model {name}", model.model_state["model"], name, where)
        own = dict(model.facts)
        if facts["stack"] is None:
            _require("the model", facts["model"], name, where)
            _require(f"the run of the model {name}", own.get("run_id"), facts["run_id"], where)
        for fact in ("symbol", "horizon", "data"):
            _require(f"the {fact} of the model {name}", own.get(fact), facts[fact], where)
        _require(f"the features of the model {name}", list(model.feature_names), facts["feature_names"], where)
        for part in ("data", "market"):
            _require(f"the settings of {part} of the model {name}", model.spec[part], settings[part], where)
    if facts["stack"] is not None:
        stack = facts["stack"]
        _require("the models of the stack", list(Stack.from_dict(stack["stack"]).names), list(models), where)
        Calibration.from_model_state(stack)
        for part in ("data", "market"):
            _require(f"the settings of {part} of the stack", stack["spec"][part], settings[part], where)
    _require("the classes", facts["classes"], list(stored_label_classes(settings)), where)
    _require("the look-back", facts["lookback"], max(model.lookback for model in models.values()), where)
    _require("the warm-up", facts["warmup_bars"], warmup_bars(spec, models), where)
    _check_card_facts(facts, where)


def _check_card_facts(facts: Mapping, where: object) -> None:
    """Raise CheckpointError where a fact that only the card and reports show cannot be one."""
    check_symbol(facts["symbol"])
    for name in ("run_id", "file"):
        value = str(facts.get(name, ""))
        plain = _NAME.fullmatch(value) and PurePosixPath(value).name == value
        _require_that(bool(plain), f"the name in {name}", value, "a name without folders", where)
    times = [facts["split_times"][name] for name in ("validation", "test", "last_label")]
    _require_that(_are_rising(times), "the times of the splits", times, "rising times", where)
    rows = facts["metrics"]
    sound = isinstance(rows, list) and all(_is_metric(row) for row in rows)
    _require_that(sound, "the metrics", rows, "names and finite numbers", where)
    forecasts = [(row["split"], row["name"]) for row in rows]
    _require_that(len(set(forecasts)) == len(forecasts), "the metrics", forecasts, "each forecast once", where)
    certificate = facts["certificate"]
    if certificate is None:
        _require("the certificate in words", facts["certified"], UNCERTIFIED, where)
    else:
        _require_that(facts["certified"] != UNCERTIFIED, "the certificate in words", UNCERTIFIED, "its cuts", where)


def _is_metric(row: Any) -> bool:
    """Return whether a row of metrics has names, and numbers that can be measured, with their order in an interval."""
    if not isinstance(row, Mapping) or row.get("split") not in ("validation", "test"):
        return False
    values = [row[name] for name in _NUMBERS if row.get(name) is not None]
    numbers = all(isinstance(one, int | float) and math.isfinite(one) for one in values)
    ends = [row.get(f"gain_best{end}") for end in ("_low", "", "_high")]
    ordered = None in ends or not numbers or ends[0] <= ends[1] <= ends[2]
    return isinstance(row.get("name"), str) and numbers and ordered and row.get("log_loss", 0) >= 0


def _are_rising(times: list[str]) -> bool:
    try:
        moments = [pd.Timestamp(one) for one in times]
        return all(one.tzinfo is not None for one in moments) and moments == sorted(moments)
    except (TypeError, ValueError):
        return False


def _require(what: str, got: object, wanted: object, where: object) -> None:
    _require_that(got == wanted, what, got, wanted, where)


def _require_that(sound: bool, what: str, got: object, wanted: object, where: object) -> None:
    if not sound:
        raise CheckpointError(
            f"The parts of this bundle do not belong together: {what}", where=where, got=_short(got),
            wanted=_short(wanted), next_step="export it again from the workspace (python -m ml_factory export)",
        )  # fmt: skip


def _short(value: object) -> str:
    return " ".join(str(value).split())[:120]
