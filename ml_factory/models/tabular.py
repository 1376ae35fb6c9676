"""XGBoost, LightGBM, CatBoost and a linear baseline, trained in blocks that resume to the bit.

A booster that samples rows and columns and is continued from its model file draws other random numbers than one that
was never interrupted. So every run, interrupted or not, trains in blocks of fixed length. A block takes a seed derived
from its number and starts from the scores that the blocks before gave each row, which a run that goes on computes again
to the same bits; the model is the list of its blocks, each in the library's own format. The linear model draws nothing,
and starts again.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np

from ml_factory.errors import CheckpointError, FactoryError
from ml_factory.models.base import (
    ModelBase,
    ModelFitResult,
    apply_fit_limits,
    bind_model_to_callbacks,
    build_model_settings,
    check_checkpoint_of_same_fit,
    describe_differences,
    log_flat_training_loss,
    mean_log_loss,
    merge_inexact_reasons,
    restore_callback_history,
    softmax,
)
from ml_factory.models.session_clock_offset import SessionClockOffset, check_clock_offset_settings
from ml_factory.models.tabular_data import (
    TabularBoosterSpec,
    TabularRows,
    TabularSpec,
    apply_tabular_class_weights,
    check_tabular_rows,
    refuse_damaged_training,
    to_tabular_matrix,
    training_data_checksum,
)
from ml_factory.progress import progress_phase
from ml_factory.seeding import derive_seed


class BlockTrainer:
    """A model in training, which resumes from what `fitted` gave after its last block. A subclass has

    grow(first, until, seed) : train rounds first..until; returns the training and validation log loss after each.
    fitted(rounds) : the model of the first `rounds` rounds, in the library's own bytes or in arrays.
    """

    def restore(self, fitted: Any) -> None:
        """Restore what `fitted` gave."""


class TabularModel(ModelBase):
    """Base of the tabular models. A subclass has

    library : package whose version its bits depend on.
    _trainer(spec, train, valid) : a `BlockTrainer`.
    _read(fitted) : the predictor of a finished model.
    _scores(x) : class scores (N, 3) of the trees or weights, without the offset.
    _gain() : gains (F,) of any scale.
    """

    Spec: type[TabularSpec] = TabularBoosterSpec
    library: str

    def __init__(self, **settings: Any):
        self.settings = build_model_settings(self.Spec, settings, where=self.name)
        self.n_features = 0
        self.best_round = 0
        self._fitted: Any = None
        self._predictor: Any = None
        self._growing: tuple[BlockTrainer, int] | None = None  # while fitting: trainer, rounds
        self._offset: SessionClockOffset | None = None

    def _environment(self, spec: TabularSpec) -> dict:
        """Return the facts that the bits of a fit depend on."""
        return {"threads": spec.thread_count, self.library: version(self.library)}

    # ---------------------------------------------------------------------- training

    def fit(self, x, y, sample_weight=None, *, validation=None, callbacks=(), checkpoints=None, limits=None):
        spec, limited = apply_fit_limits(self.settings, limits)
        train = check_tabular_rows(x, y, sample_weight, where="training")
        valid = None if validation is None else check_tabular_rows(*validation)
        train, valid = apply_tabular_class_weights(train, valid, spec.class_weight)
        arrays = [array for part in (train, valid) if part for array in (part.x, part.target, part.weight)]
        data = training_data_checksum(train.x.shape[1], *arrays)
        run, here = {"model": self.name, "settings": spec.identity(), "data": data}, self._environment(spec)
        self.n_features = train.x.shape[1]
        start = self._start_from_offset(spec, train, valid)
        saved = checkpoints.load() if checkpoints is not None else None
        nothing = {**run, "environment": here, "inexact": [], "rounds": 0, "history": [], "train": [], "val": []}
        progress = dict(saved["state"]) if saved else nothing
        check_checkpoint_of_same_fit(progress, run)
        # Nondeterminism is permanent: its reasons are stored with the run.
        reasons = describe_differences(progress["environment"], here)
        if getattr(spec, "device", "cpu") != "cpu":
            reasons += (f"device: {self.name} on a GPU is not promised to the bit",)
        progress |= {"inexact": merge_inexact_reasons(progress["inexact"], reasons), "environment": here}
        callbacks = bind_model_to_callbacks(callbacks, self)
        restore_callback_history(callbacks, progress["history"])
        resumed_from = len(progress["history"]) if saved else None
        if "finished" not in progress:
            try:
                self._train(spec, train, valid, progress, callbacks, checkpoints, start)
            finally:
                self._growing = None
        with refuse_damaged_training():
            self.load_state(progress["finished"])
        return ModelFitResult(
            history=list(progress["history"]), best_epoch=-(-self.best_round // spec.block), limited=limited,
            best_round=self.best_round, resumed_from=resumed_from, stopped_early=progress["rounds"] < spec.rounds,
            exact=not progress["inexact"], nondeterminism=tuple(progress["inexact"]),
        )  # fmt: skip

    def _start_from_offset(self, spec: TabularSpec, train: TabularRows, valid: TabularRows | None) -> float:
        """Fit the offset on the weighted training rows and add it to both parts; return its validation loss.

        The loss is infinite without an offset: only with one may the model of 0 rounds be the best.
        """
        self._offset = None
        if spec.offset_column < 0:
            return np.inf
        check_clock_offset_settings(spec.offset_column, spec.offset_bars, train.x.shape[1])
        clock, given = train.x[:, spec.offset_column], {"column": spec.offset_column, "ending": spec.offset_bars}
        self._offset = SessionClockOffset.fit(clock, train.target, train.weight, **given)
        for part in filter(None, (train, valid)):
            part.offset = self._offset.log_class_shares(part.x[:, spec.offset_column])
        return np.inf if valid is None else mean_log_loss(valid.offset, valid.target, valid.weight)

    def _train(
        self, spec: TabularSpec, train: TabularRows, valid: TabularRows | None, progress: dict, callbacks, checkpoints,
        start: float,
    ) -> None:  # fmt: skip
        """Train blocks of rounds until all are done or patience ends, and take the best round."""
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
                    fitted = trainer.fitted(progress["rounds"])
                    checkpoints.save({**progress, "fitted": fitted, "offset": self._offset_state()}, metrics=metrics)
                moved(progress["rounds"] - before)
                for callback in callbacks:
                    callback(len(progress["history"]), dict(metrics))
        losses = progress["val"][: early_stopping_round(progress["val"], spec.patience, start)]
        best = int(np.argmin(losses)) + 1 if losses else progress["rounds"]
        if losses and start <= min(losses):
            best = 0  # no round is better than the clock; the first one is stored and not used
        progress["finished"] = self._state(trainer.fitted(max(best, 1)), best)
        progress.pop("fitted", None)
        if checkpoints is not None:
            checkpoints.save(progress, metrics=progress["history"][-1], force=True)

    def _grow_block(self, spec: TabularSpec, trainer: BlockTrainer, progress: dict) -> dict:
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

    def predict_proba(self, x) -> np.ndarray:
        x = self._checked_input(x)
        if not len(x):
            return np.empty((0, 3))
        scores = self._scores(x) if self.best_round else np.zeros((len(x), 3))
        if self._offset is not None:
            scores = scores + self._offset.log_class_shares(x[:, self._offset.column])
        return softmax(scores)

    def importances(self) -> np.ndarray:
        """Return each feature's gain while training, float64 (F,), summing to 1 (to 0 where nothing was learnt)."""
        self._checked_input(np.zeros((0, self.n_features)))
        gain = np.asarray(self._gain(), dtype=np.float64) if self.best_round else np.zeros(self.n_features)
        return gain / (gain.sum() or 1.0)

    def _checked_input(self, x) -> np.ndarray:
        """Return x as this fitted model reads it."""
        if self._predictor is None:
            raise FactoryError("The model is not fitted", where=self.name, next_step="call fit or load first")
        x = to_tabular_matrix(x, "x")
        if x.shape[1] != self.n_features:
            raise FactoryError("Wrong number of features", where=self.name, got=x.shape[1], wanted=self.n_features)
        return x

    def get_state(self) -> dict:
        if self._growing is not None:
            trainer, rounds = self._growing
            return self._state(trainer.fitted(rounds), rounds)
        return self._state(self._fitted, self.best_round)

    def state_from_checkpoint(self, saved: Mapping) -> dict:
        if "finished" in saved:
            return dict(saved["finished"])
        facts = {"n_features": saved["data"]["features"], "offset": saved.get("offset")}
        return self._state(saved.get("fitted"), saved["rounds"]) | facts

    def _offset_state(self) -> dict | None:
        return None if self._offset is None else self._offset.to_dict()

    def _state(self, fitted: Any, best: int) -> dict:
        return self._with_trained_on({
            "model": self.name, "settings": asdict(self.settings),
            "library": f"{self.library} {version(self.library)}",
            "n_features": self.n_features, "best_round": best, "fitted": fitted, "offset": self._offset_state(),
        })  # fmt: skip

    def load_state(self, state):
        state = self._checked_state(state)
        self.settings = build_model_settings(self.Spec, state["settings"], where=self.name)
        self.n_features, self.best_round = state["n_features"], state["best_round"]
        self._fitted = state["fitted"]
        self._offset = None if state["offset"] is None else SessionClockOffset.from_dict(state["offset"])
        try:
            self._predictor = None if self._fitted is None else self._read(self._fitted)
        except Exception as error:  # each library raises errors of its own
            raise CheckpointError(
                f"{self.library} cannot read this model", where=self.name, got=" ".join(str(error).split())[:200],
                wanted=f"a model of {state['library']}", next_step="install that version, or train again",
            ) from error  # fmt: skip
        return self


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

    def _scores(self, x):
        scores = None
        for block in self._predictor:
            scores = self._add(scores, block, x)
        return np.asarray(scores, dtype=np.float64)


class BlockListTrainer(BlockTrainer):
    """Training of a `BlockListBooster`.

    bins, inputs : of the training and validation rows, what `_train_block` and what `_add` reads.
    scores : what the first block starts from.
    """

    def __init__(self, booster: BlockListBooster, spec: Any, bins: list, inputs: list, scores: list):
        self.booster, self.spec, self.bins, self.inputs, self.scores = booster, spec, bins, inputs, scores
        self.blocks: list[bytes] = []

    def grow(self, first, until, seed):
        block, *losses = self.booster._train_block(self.spec, self.bins, self.scores, until - first, seed)
        self._append(block, self.booster._to_bytes(block))
        return losses

    def _append(self, block: Any, data: bytes) -> None:
        self.blocks.append(data)
        self.scores = [self.booster._add(score, block, x) for score, x in zip(self.scores, self.inputs, strict=True)]

    def fitted(self, rounds):
        whole, more = divmod(rounds, self.spec.block)
        if not more:
            return self.blocks[:whole]
        last = self.booster._from_bytes(self.blocks[whole])
        return [*self.blocks[:whole], self.booster._to_bytes(last, more)]

    def restore(self, fitted):
        for data in fitted:
            self._append(self.booster._from_bytes(data), data)


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
