"""XGBoost, LightGBM, CatBoost and a linear baseline, trained in blocks that resume to the bit.

A booster that samples rows and columns and is continued from its model file draws other random numbers than one that
was never interrupted. So every run, interrupted or not, trains in blocks of fixed length. A block takes a seed derived
from its number and starts from the scores that the blocks before gave each row, which a resumed run computes again
to the same bits; the model is the list of its blocks, each in the library's own format. The linear model draws nothing,
and starts again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings
from ml_factory.errors import CheckpointError, FactoryError
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import (
    EstimatorSpec,
    ModelBase,
    ModelFitResult,
    build_model_settings,
    check_checkpoint_of_same_fit,
    describe_differences,
    log_flat_training_loss,
    mean_log_loss,
    merge_inexact_reasons,
    refuse_damaged_training,
    restore_callback_history,
)
from ml_factory.models.rows import TrainingRows, labels_to_class_index
from ml_factory.progress import progress_phase
from ml_factory.seeding import derive_seed

inspection = LazyModule("sklearn.inspection")  # only a training reads it


@dataclass(frozen=True)
class TabularSpec(EstimatorSpec):
    """Settings of every tabular model.

    rounds : trees per class, or steps of the linear fit, at most.
    block : rounds between two possible checkpoints.
    """

    SEARCH: ClassVar = {"l2": (0.1, 100.0, "log")}
    rounds: int = 300
    block: int = 10
    l2: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_settings(self, rounds="[1, inf)", block="[1, inf)", l2="[0, inf)")


@dataclass(frozen=True)
class TabularBoosterSpec(TabularSpec):
    """Settings of all boosters.

    row_sample, column_sample : share drawn for each tree.
    """

    SEARCH: ClassVar = TabularSpec.SEARCH | {
        "learning_rate": (0.01, 0.2, "log"), "depth": (2, 6), "row_sample": (0.4, 1.0), "column_sample": (0.2, 1.0),
    }  # fmt: skip
    learning_rate: float = 0.05
    depth: int = 3
    row_sample: float = 0.8
    column_sample: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        share = "(0, 1]"
        check_settings(self, depth="[1, inf)", learning_rate=share, row_sample=share, column_sample=share)


@dataclass(frozen=True)
class LeafSizeSpec(TabularBoosterSpec):
    """Settings of the boosters that bound the rows of a leaf, which CatBoost does not for symmetric trees.

    min_leaf : rows a leaf holds at least.
    """

    SEARCH: ClassVar = TabularBoosterSpec.SEARCH | {"min_leaf": (5.0, 500.0, "log")}
    min_leaf: float = 20.0

    def __post_init__(self):
        super().__post_init__()
        check_settings(self, min_leaf="[0, inf)")


class TabularModel(ModelBase):
    """Base of the tabular models. A subclass has

    library : package whose version its bits depend on.
    _trainer(spec, train, valid) : the model in training, with
        grow(first, until, seed) : train rounds first..until; returns the training and validation log loss after each.
        fitted(rounds) : the model of the first `rounds` rounds, in the library's own bytes or in arrays.
        restore(fitted) : go on from what `fitted` gave after the last block.
    _read(fitted) : the predictor of a finished model.
    _margins(x) : class scores (N, 3) of the trees or weights.
    _gain() : gains (F,) of any scale.
    """

    Spec: type[TabularSpec]
    library: str

    def __init__(self, **settings: Any):
        self.set_settings(settings)
        self.best_round = 0
        self._bytes: Any = None  # the fitted model as it is stored
        self._predictor: Any = None
        self._growing: tuple[Any, int] | None = None  # while fitting: trainer, rounds

    def set_settings(self, given):
        (self.settings,) = build_model_settings(given, self.Spec, where=self.name)

    def _environment(self, spec: TabularSpec) -> dict:
        """Return the facts that the bits of a fit depend on."""
        return {"threads": spec.thread_count, self.library: version(self.library)}

    def _inputs(self, x, where, features):
        """Return x_NF as contiguous float32; NaN is a missing value, an infinity is refused."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        if x.ndim != 2:
            raise FactoryError(
                "Tabular models read rows of features", where=where, got=f"shape {x.shape}", wanted="(N, F)"
            )
        if features and x.shape[1] != features:
            raise FactoryError("Wrong number of features", where=self.name, got=x.shape[1], wanted=features)
        if np.isinf(x).any():
            row, column = np.argwhere(np.isinf(x))[0]
            raise FactoryError("Infinite feature", where=f"{where}, row {row}, column {column}", wanted="finite or NaN")
        return x

    def _column(self, x, column):
        return x[:, column]

    def _arrays(self, x):
        return (x,)

    # ---------------------------------------------------------------------- training

    def _learn(self, spec, train, valid, identity, callbacks, checkpoints):
        here, saved = self._environment(spec), checkpoints.load() if checkpoints is not None else None
        nothing = {**identity, "environment": here, "inexact": [], "rounds": 0, "history": [], "train": [], "val": []}
        progress = dict(saved["state"]) if saved else nothing
        check_checkpoint_of_same_fit(progress, identity)
        # Nondeterminism is permanent: its reasons are stored with the run.
        reasons = describe_differences(progress["environment"], here)
        if getattr(spec, "device", "cpu") != "cpu":
            reasons += (f"device: {self.name} on a GPU is not promised to the bit",)
        progress |= {"inexact": merge_inexact_reasons(progress["inexact"], reasons), "environment": here}
        restore_callback_history(callbacks, progress["history"])
        resumed_from = len(progress["history"]) if saved else None
        if "best_round" not in progress:
            try:
                self._train(spec, train, valid, progress, callbacks, checkpoints)
            finally:
                self._growing = None
        with refuse_damaged_training():
            self._load_parts(self._parts_of_checkpoint(progress))
        return ModelFitResult(
            history=list(progress["history"]), best_epoch=-(-self.best_round // spec.block),
            resumed_from=resumed_from, stopped_early=progress["rounds"] < spec.rounds,
            nondeterminism=tuple(progress["inexact"]),
        )  # fmt: skip

    def _train(
        self, spec: TabularSpec, train: TrainingRows, valid: TrainingRows | None, progress: dict, callbacks, checkpoints
    ) -> None:
        """Train blocks of rounds until all are done or patience ends, and take the best round."""
        start = np.inf  # loss of 0 rounds, which may be the best ones of a model with an offset
        if valid is not None and valid.offset is not None:
            start = mean_log_loss(valid.offset, valid.target, valid.weight)
        trainer = self._trainer(spec, train, valid)
        if progress["rounds"]:
            with refuse_damaged_training():
                trainer.restore(progress["fitted"])
        with progress_phase("training", spec.rounds, of="rounds", start=progress["rounds"]) as moved:
            while (
                progress["rounds"] < spec.rounds and early_stopping_round(progress["val"], spec.patience, start) is None
            ):
                before, metrics = progress["rounds"], self._grow_block(spec, trainer, progress)
                if checkpoints is not None and checkpoints.due():
                    checkpoints.save({**progress, "fitted": trainer.fitted(progress["rounds"])}, metrics=metrics)
                moved(progress["rounds"] - before)
                for callback in callbacks:
                    callback(len(progress["history"]), dict(metrics))
        losses = progress["val"][: early_stopping_round(progress["val"], spec.patience, start)]
        best = int(np.argmin(losses)) + 1 if losses else progress["rounds"]
        if losses and start <= min(losses):
            best = 0  # no round is better than the clock; the first one is stored and not used
        progress |= {"best_round": best, "fitted": trainer.fitted(max(best, 1))}
        if checkpoints is not None:
            checkpoints.save(progress, metrics=progress["history"][-1], force=True)

    def _grow_block(self, spec: TabularSpec, trainer: Any, progress: dict) -> dict:
        """Train one block and record its losses; returns its metrics."""
        began, first = time.perf_counter(), progress["rounds"]
        block, until = first // spec.block, min(first + spec.block, spec.rounds)
        train_loss, val_loss = trainer.grow(first, until, derive_seed(spec.seed, self.name, "block", block))
        progress["train"] = progress["train"] + [float(loss) for loss in train_loss]
        progress["val"] = progress["val"] + [float(loss) for loss in val_loss]
        metrics = {
            "train_loss": progress["train"][-1], "val_loss": progress["val"][-1] if progress["val"] else None,
            "seconds": time.perf_counter() - began,
        }  # fmt: skip
        progress["rounds"], self._growing = until, (trainer, until)
        progress["history"] = [*progress["history"], {"epoch": block + 1, **metrics}]
        if hasattr(spec, "learning_rate"):
            log_flat_training_loss(progress["history"], spec.learning_rate)
        return metrics

    # ---------------------------------------------------------------------- the fitted model

    def _scores(self, x):
        self._fitted(self._predictor)
        return self._margins(x) if self.best_round else np.zeros((len(x), 3))

    def importances(self) -> np.ndarray:
        """Return each feature's gain while training, float64 (F,), summing to 1 (to 0 where nothing was learnt)."""
        self._fitted(self._predictor)
        gain = np.asarray(self._gain(), dtype=np.float64) if self.best_round else np.zeros(self.n_features)
        return gain / (gain.sum() or 1.0)

    def _parts(self):
        fitted, best = self._bytes, self.best_round
        if self._growing is not None:
            trainer, best = self._growing
            fitted = trainer.fitted(best)
        return {"library": f"{self.library} {version(self.library)}", "best_round": best, "fitted": fitted}

    def _parts_of_checkpoint(self, saved):
        best = saved.get("best_round", saved["rounds"])
        return self._parts() | {"best_round": best, "fitted": saved.get("fitted")}

    def _load_parts(self, state):
        self.best_round, self._bytes = state["best_round"], state["fitted"]
        try:
            self._predictor = None if self._bytes is None else self._read(self._bytes)
        except Exception as error:  # each library raises errors of its own
            raise CheckpointError(
                f"{self.library} cannot read this model", where=self.name, got=" ".join(str(error).split())[:200],
                wanted=f"a model of {state['library']}", next_step="install that version, or train again",
            ) from error  # fmt: skip


class BlockListBooster(TabularModel):
    """A booster whose model is a list of blocks: each is a model of its library that starts from the scores so far.

    Scores are float (N, 3); None stands for the start of the library, before the first block. A subclass has

    _train_block(spec, bins, scores, rounds, seed) : train from the scores of the training and validation rows; returns
        the library's model of the block, and the training and validation log loss after each of its rounds.
    _add(scores, block, x) : the scores of the rows x with those of a block added.
    _to_bytes(block, rounds) : the library's own format of a block; of its first `rounds` alone where given.
    _from_bytes(data) : the library's model of a block.
    """

    def _read(self, fitted):
        return [self._from_bytes(data) for data in fitted]

    def _margins(self, x):
        scores = None
        for block in self._predictor:
            scores = self._add(scores, block, x)
        return np.asarray(scores, dtype=np.float64)


class BlockListTrainer:
    """Training of a `BlockListBooster`.

    bins, inputs : of the training and validation rows, what `_train_block` and what `_add` reads.
    scores : what the first block starts from.
    """

    def __init__(self, booster: BlockListBooster, spec: Any, bins: list, inputs: list, scores: list):
        self.booster, self.spec, self.bins, self.inputs, self.scores = booster, spec, bins, inputs, scores
        self.blocks: list[bytes] = []
        self.not_added: list[Any] = []  # blocks of which the scores lack: only a next block needs them

    def grow(self, first, until, seed):
        for block in self.not_added:
            pairs = zip(self.scores, self.inputs, strict=True)
            self.scores = [self.booster._add(score, block, x) for score, x in pairs]
        block, *losses = self.booster._train_block(self.spec, self.bins, self.scores, until - first, seed)
        self.not_added = [block]
        self.blocks.append(self.booster._to_bytes(block))
        return losses

    def fitted(self, rounds):
        whole, more = divmod(rounds, self.spec.block)
        if not more:
            return self.blocks[:whole]
        last = self.booster._from_bytes(self.blocks[whole])
        return [*self.blocks[:whole], self.booster._to_bytes(last, more)]

    def restore(self, fitted):
        self.blocks, self.not_added = list(fitted), [self.booster._from_bytes(data) for data in fitted]


def early_stopping_round(val: list[float], patience: int, start: float = np.inf) -> int | None:
    """Return the round after which `patience` rounds had brought no lower loss; None while they have not.

    start : loss before the first round.
    """
    best, at = start, 0
    for number, loss in enumerate(val, 1):
        if loss < best:
            best, at = loss, number
        elif 0 < patience <= number - at:
            return number
    return None


def feature_importance_table(
    model: TabularModel, names: Sequence[str], x, y, weight=None, *, top: int = 20, rows: int = 2_000, repeats: int = 3
) -> pd.DataFrame:
    """Return a row per feature, those of greatest gain: gain (share of training's), permuted (nats a row), spread.

    permuted : increase of the weighted log loss when the feature is shuffled (Breiman 2001), mean of the repeats;
        spread is their deviation. Near 0 the model does not use the feature, or others replace it; below, it did harm.
    x, y, weight : validation rows: unseen by training, and no test rows.
    rows : number of evenly spaced rows to permute, at most.
    """
    columns = ["gain", "permuted", "spread"]
    gain = model.importances()
    best = np.argsort(-gain, kind="stable")[:top]
    some = np.unique(np.linspace(0, len(x) - 1, min(rows, len(x))).astype(np.int64))
    x, weight = np.array(x)[some], None if weight is None else np.asarray(weight)[some]
    cells = np.arange(len(some)), labels_to_class_index(np.asarray(y)[some])

    def score(model: TabularModel, permuted: np.ndarray, _, sample_weight=None) -> float:
        x[:, best] = permuted
        happened = np.asarray(model.predict_proba(x), np.float64)[cells]
        return float(np.average(np.log(np.maximum(happened, np.finfo(np.float64).eps)), weights=sample_weight))

    found = inspection.permutation_importance(
        model, x[:, best], cells[1], scoring=score, n_repeats=repeats, random_state=0, sample_weight=weight
    )
    values = np.column_stack([gain[best], found.importances_mean, found.importances_std])
    return pd.DataFrame(values, columns=columns, index=pd.Index([names[column] for column in best], name="feature"))
