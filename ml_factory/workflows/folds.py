"""Folds of a cross-validation or a stack: how rows are cut, and the fit on each fold, which leaves a file.

A fold whose file is there is not fitted again; an interrupted fit resumes from its checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import SCHEMES
from ml_factory.errors import CheckpointError, FactoryError, FileError, check_known
from ml_factory.evaluation.calibration import Calibration, condition_on_classes
from ml_factory.models.base import describe_differences, merge_inexact_reasons
from ml_factory.models.registry import build_model
from ml_factory.runs import FitCheckpoints, Run
from ml_factory.seeding import derive_seed
from ml_factory.storage.files import files
from ml_factory.storage.mirror import push_in_background
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.targets.splits import (
    CombinatorialFolds,
    Fold,
    combinatorial_purged_folds,
    purged_kfold,
    walk_forward_expanding,
    walk_forward_rolling,
)
from ml_factory.targets.weights import effective_sample_size
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset,
    dataset_rows_with_weight,
    fit_dataset_preprocessing,
    limit_training_rows,
    resolve_dataset_settings,
)
from ml_factory.workflows.train import fit_on_rows

Observer = Callable[[dict], object]
VALIDATION_SHARE = 0.15  # last part of a fold's training rows, for early stopping and calibration


# ---- the plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoldSchemeSpec:
    """Settings of a cross-validation scheme.

    name : one of `argument_checks.SCHEMES`.
    folds : number of test blocks; of "combinatorial" the blocks to choose from.
    test_blocks : of "combinatorial", number of test blocks per fold.
    window : of "walk_forward_rolling", number of training rows; None: as many as the first fold has.
    """

    name: str = "purged_kfold"
    folds: int = 5
    test_blocks: int = 2
    window: int | None = None

    def __post_init__(self):
        check_known("Unknown scheme of folds", "scheme", self.name, SCHEMES)

    def cut(self, labels: pd.DataFrame, embargo: int) -> Sequence[Fold]:
        """Return (train, test) positions into `labels` of each fold. Raises SettingsError when the rows cannot be cut
        like this.
        """
        if self.name == "purged_kfold":
            return purged_kfold(labels, self.folds, embargo)
        if self.name == "walk_forward_expanding":
            return walk_forward_expanding(labels, self.folds)
        if self.name == "walk_forward_rolling":
            return walk_forward_rolling(labels, self.folds, self.window)
        return combinatorial_purged_folds(labels, self.folds, self.test_blocks, embargo)

    def to_dict(self) -> dict:
        """Return the settings that determine the folds, for the run's record."""
        own = {"walk_forward_rolling": {"window": self.window}, "combinatorial": {"test_blocks": self.test_blocks}}
        return {"scheme": self.name, "folds": self.folds} | own.get(self.name, {})


@dataclass(frozen=True)
class FoldPlan:
    """Rows, folds and test blocks of a cross-validation.

    rows : int64 positions into the labels' rows.
    labels : the labels of these rows.
    folds : (train, test) positions into `rows`, purged and embargoed.
    usable : bool, rows with a full input window.
    block : int64, test block of each row, -1 for none.
    paths : int64 (paths, blocks), the fold whose forecast of each block a path takes; None where each row is tested
        once.
    quick_limits : limits of QUICK.
    embargo : rows left out behind a test block.
    """

    rows: np.ndarray
    labels: pd.DataFrame
    folds: Sequence[Fold]
    usable: np.ndarray
    block: np.ndarray
    paths: np.ndarray | None
    quick_limits: dict
    embargo: int

    def table(self) -> pd.DataFrame:
        """Return per fold the number of training, test and left-out rows (purged, embargoed, without a window, or by
        QUICK).

        effective_train, effective_test : number of non-overlapping rows with the same information.
        """
        rows = [
            {
                "fold": number, "train": len(train), "test": len(test),
                "left_out": len(self.rows) - len(train) - len(test),
                "effective_train": effective_sample_size(self.labels.iloc[train]),
                "effective_test": effective_sample_size(self.labels.iloc[test]),
            }
            for number, (train, test) in enumerate(self.folds)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def fit_and_held_out(self, number: int) -> Fold:
        """Return the training rows of a fold with a full window, as positions into `rows`: those that are fitted on,
        and those of early stopping and calibration.
        """
        train = self.folds[number][0]
        return inner_validation_split(self.labels, train[self.usable[train]])


def plan_folds(
    data: PreparedDataset, rows: np.ndarray, scheme: FoldSchemeSpec, lookback: int, limit: int = 0
) -> FoldPlan:
    """Cut `rows` into folds; the embargo is at least the model's input window.

    limit : most training rows of all folds together, which QUICK sets; 0 for none.
    """
    labels = data.labels.iloc[rows]
    embargo = max(int(data.settings["data"]["splits"]["embargo_bars"]), lookback)
    cut = scheme.cut(labels, embargo)
    block, paths, quick_limits = np.full(len(rows), -1), None, {}
    if isinstance(cut, CombinatorialFolds):
        block, paths = np.repeat(np.arange(len(cut.edges) - 1), np.diff(cut.edges)), cut.paths
    else:
        for number, (_, test) in enumerate(cut):
            block[test] = number
    if limit:
        kept = [(*limit_training_rows(train, max(1, limit // len(cut))), test) for train, test in cut]
        limits = [limit["training rows"] for _, limit, _ in kept if limit]
        quick_limits = {"rows of a fold": limits[-1]} if limits else {}
        cut = [(train, test) for train, _, test in kept]
    return FoldPlan(rows, labels, cut, data.full_window_mask(lookback)[rows], block, paths, quick_limits, embargo)


def inner_validation_split(labels: pd.DataFrame, train: np.ndarray) -> Fold:
    """Split training positions once more in time, for early stopping inside a fold: (fit, validation).

    Validation is the last 15 % of the positions; a row is fitted on only when its label had ended before the first
    validation row was known. Thirteen rows, labels of two bars (f: fit, v: validation)::

        row   0 1 2 3 4 5 6 7 8 9 10 11 12
              f f f f f f f f f .  .  v  v     (rows 9 and 10 end at or after row 11 is known)

    Raises FactoryError when nothing is left to fit or to validate on.
    """
    train = np.sort(train)
    first = len(train) - round(VALIDATION_SHARE * len(train))
    fit, validation = train[:first], train[first:]
    if len(validation):
        fit = fit[labels["label_end"].to_numpy()[fit] < labels.index.to_numpy()[validation[0]]]
    if not len(fit) or not len(validation):
        raise FactoryError(
            "A fold has too few training rows for early stopping",
            got=f"{len(train)} rows, {VALIDATION_SHARE:.0%} of them for validation",
            wanted="rows left on both sides", next_step="use fewer folds, or more bars",
        )  # fmt: skip
    return fit, validation


# ---- the fits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoldModel:
    """The model that every fold fits, with the settings that all fits share.

    seed : of the run; that of each fold is derived from it.
    name : name in the registry; a stack has several models.
    settings : the model's own settings.
    """

    seed: int
    name: str
    settings: Mapping


@dataclass(frozen=True)
class FoldForecasts:
    """Forecasts of the folds of `plan`.

    forecasts : for each fold float64 (test rows, 3), NaN where none, uncalibrated.
    calibrations : of each fold, fitted on training rows of the fold.
    resumed : number of folds that were there.
    inexact : reasons why a fold may differ in its last bits; empty when it is exact.
    reached : progress of earlier sessions in words; "" where all folds were fitted now.
    """

    plan: FoldPlan
    forecasts: list[np.ndarray]
    calibrations: list[Calibration]
    resumed: int = 0
    inexact: tuple[str, ...] = ()
    reached: str = ""

    @property
    def p_N3(self) -> np.ndarray:
        """Probabilities of the plan's rows, float64 (N, 3), NaN where none; for schemes that test each row once."""
        p_N3 = np.full((len(self.plan.rows), 3), np.nan)
        for (_, test), p in zip(self.plan.folds, self.forecasts, strict=True):
            p_N3[test] = p
        return p_N3

    @property
    def unfitted_folds(self) -> list[int]:
        """Numbers of folds without forecasts, since their training rows hold one class."""
        return [number for number, p in enumerate(self.forecasts) if not np.isfinite(p).any()]


def fit_folds(
    run: Run, data: PreparedDataset, plan: FoldPlan, model: FoldModel, observe: Observer | None = None
) -> FoldForecasts:
    """Fit the model once per fold and predict the fold's test rows. Scaler and weights too are fitted on the fold
    alone.

    observe : called after each fit with its facts by name: train (rows of positive weight), scaler, inputs_train, y,
        inputs_test.
    Raises FactoryError when no fold has training rows of two classes.
    """
    reached, machine, found, resumed = run.fold_progress(model.name), run.machine, [], 0
    for number, (_, test) in enumerate(plan.folds):
        path, phase = run.fold_path(model.name, number + 1, len(plan.folds)), run.fold_phase(model.name, number + 1)
        state = _read_fold(path, (len(test), 3))
        resumed += state is not None
        if state is None:
            checkpoints = FitCheckpoints(phase, machine)
            p, calibration, inexact = fit_fold(data, plan, model, number, checkpoints, observe)
            inexact = merge_inexact_reasons(inexact, checkpoints.machine_differences)
            state = {"p": p, "calibration": calibration.to_dict(), "inexact": inexact, "machine": machine}
            write_state_file(path, state)
            push_in_background(run.folder)  # the checkpoints go now, and a machine may vanish before the last fold
        phase.remove_files()
        found.append(state)
    elsewhere = [text for one in found for text in describe_differences(found[0]["machine"], one["machine"])]
    inexact = merge_inexact_reasons([text for one in found for text in one["inexact"]], elsewhere)
    forecasts = FoldForecasts(
        plan, [one["p"] for one in found], [Calibration.from_dict(one["calibration"]) for one in found], resumed,
        tuple(inexact), reached,
    )  # fmt: skip
    if len(forecasts.unfitted_folds) == len(plan.folds):
        raise FactoryError(
            "No fold has training rows of two classes", where=f"{len(plan.folds)} folds",
            got=f"one class in each fold, which {model.name} cannot learn from",
            next_step="prepare more bars, or set closer barriers: a smaller k_up, k_down",
        )  # fmt: skip
    return forecasts


def _read_fold(path: Path, shape: tuple[int, int]) -> dict | None:
    """Read a finished fold; None where the file is missing, torn, or of other test rows."""
    try:
        state = read_state_file(path) if files.is_file(path) else None
    except (FileError, CheckpointError):  # torn or damaged: made again
        return None
    if state is None or set(state) != {"p", "calibration", "inexact", "machine"}:
        return None
    state["p"] = np.array(state["p"], dtype=np.float64)
    return state if state["p"].shape == shape else None


def fit_fold(
    data: PreparedDataset,
    plan: FoldPlan,
    model: FoldModel,
    number: int,
    checkpoints: FitCheckpoints | None,
    observe: Observer | None,
) -> tuple[np.ndarray, Calibration, Sequence[str]]:
    """Return the forecasts of a fold's test rows, float64 (test rows, 3), its calibration, and why it may be inexact.

    NaN in rows without a full window, and in all rows where the training rows hold one class.
    """
    test = plan.folds[number][1]
    p, readable = np.full((len(test), 3), np.nan), plan.usable[test]
    fit, held_out = (plan.rows[part] for part in plan.fit_and_held_out(number))
    if len(np.unique(data.y[dataset_rows_with_weight(data, fit)[0]])) < 2:
        return p, Calibration(), ()
    seed = derive_seed(model.seed, model.name, "fold", number)
    estimator, seen = build_model(model.name, seed=seed, **resolve_dataset_settings(data, model.settings)), {}
    fitted = fit_on_rows(
        data, estimator, fit, held_out, lambda rows: fit_dataset_preprocessing(data, rows),
        observe=None if observe is None else seen.update, checkpoints=checkpoints,
    )  # fmt: skip
    inputs = fitted.take(plan.rows[test[readable]])
    if readable.any():
        p[readable] = condition_on_classes(estimator.predict_proba(inputs), data.classes.values())
    if observe is not None:
        observe(seen | {"inputs_test": np.array(inputs)})
    return p, fitted.calibration, fitted.result.nondeterminism
