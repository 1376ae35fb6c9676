"""CatBoost (Prokhorenkova et al. 2018) with symmetric trees, in blocks, through its own snapshot file.

`init_model` starts a new generator and new approximants; the snapshot file (CatBoost's own binary, no pickle) keeps
both. A block is the whole training, which reads the snapshot of the block before and is stopped at the block's end:
CatBoost may refuse a snapshot of another number of rounds, since it chooses some settings by that number.
"""

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import catboost
import numpy as np

from ml_factory.errors import CheckpointError
from ml_factory.models.base import CLASSES
from ml_factory.models.tabular import BlockTrainer, TabularModel
from ml_factory.models.tabular_data import TabularBoosterSpec

_METRIC = "MultiClass"
_log = logging.getLogger("ml_factory")
_NEVER = 10**9  # seconds: the file is written when a block ends, and only then


@dataclass(frozen=True)
class _CatBoostSpec(TabularBoosterSpec):
    """Settings of CatBoost. Symmetric trees, which split each level by one condition, are deeper than those of the
    others.
    """

    depth: int = 5


class CatBoost(TabularModel):
    """One symmetric tree of three outputs a round; x_NF float32, NaN missing.

    Where the training rows lack a class it starts without offset, with a warning: CatBoost refuses a baseline of more
    classes than these rows hold.
    """

    Spec = _CatBoostSpec
    name = "catboost"
    library = "catboost"

    def _start_from_offset(self, spec, train, valid):
        if spec.offset_column >= 0 and len(np.unique(train.target)) < len(CLASSES):
            _log.warning("catboost starts from no offset: the training rows lack a class")
            self._offset = None
            return np.inf
        return super()._start_from_offset(spec, train, valid)

    def _trainer(self, spec, train, valid, resources):
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        pools = [catboost.Pool(part.x, part.target, weight=part.weight) for part in (train, valid) if part]
        pools[0].quantize()
        if valid is not None:
            pools[0].save_quantization_borders(str(folder / "borders"))
            pools[1].quantize(input_borders=str(folder / "borders"))
        if train.offset is not None:
            for pool, part in zip(pools, (train, valid), strict=False):
                pool.set_baseline(part.offset)
        return _Trainer(spec, pools, folder)

    def _read(self, fitted):
        (data,) = fitted
        return catboost.CatBoost().load_model(blob=data)

    def _scores(self, x):
        return self._predictor.predict(x, prediction_type="RawFormulaVal", thread_count=self.settings.thread_count)

    def _gain(self):
        # CatBoost keeps no gains of splits; this is the mean change of the score across a split.
        return self._predictor.get_feature_importance(type="PredictionValuesChange")


class _Until:
    """Stop CatBoost after that many rounds in all."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def after_iteration(self, info) -> bool:
        return info.iteration < self.rounds


class _Trainer(BlockTrainer):
    """Training of CatBoost; `folder` holds its snapshot."""

    def __init__(self, spec: TabularBoosterSpec, pools: list[catboost.Pool], folder: Path):
        self.folder, self.snapshot = folder, folder / "snapshot.cbsnapshot"
        self.params = {
            "loss_function": _METRIC,
            "iterations": spec.rounds,
            "classes_count": 3,
            "learning_rate": spec.learning_rate,
            "depth": min(spec.depth, 16),
            **(
                {"bootstrap_type": "Bernoulli", "subsample": spec.row_sample}
                if spec.row_sample < 1
                else {"bootstrap_type": "No"}
            ),
            "rsm": spec.column_sample,
            "l2_leaf_reg": spec.l2,
            "random_seed": spec.seed,
            "thread_count": spec.thread_count,
            "use_best_model": False,
            "logging_level": "Silent",
            "train_dir": str(folder),
            "save_snapshot": True,
            "snapshot_file": str(self.snapshot),
            "snapshot_interval": _NEVER,
        }
        self.train, self.valid = pools[0], pools[1] if len(pools) > 1 else None
        self.booster: catboost.CatBoost | None = None
        self.restored = False  # the snapshot is that of a checkpoint

    def grow(self, first, until, seed):
        # The seed of a block is not used: the snapshot carries the generator itself.
        self.booster = catboost.CatBoost(self.params)
        try:
            self.booster.fit(self.train, eval_set=self.valid, callbacks=[_Until(until)])
        except catboost.CatBoostError as error:
            if "snapshot" not in str(error).lower() and not self.restored:
                raise
            raise CheckpointError(
                "CatBoost cannot go on from the snapshot in this checkpoint",
                got=str(error).splitlines()[0][:200],
                next_step="start a new run (FRESH=True, --fresh)",
            ) from error
        losses = self.booster.get_evals_result()
        return losses["learn"][_METRIC][first:until], losses.get("validation", {}).get(_METRIC, [])[first:until]

    def fitted(self, rounds):
        if self.booster is None:  # restored where nothing is left to train: at most one round more, cut off below
            self.grow(rounds, rounds, seed=0)
        if rounds < self.booster.tree_count_:
            self.booster.shrink(rounds)
        facts = self.booster.get_metadata()
        for name in {*facts.keys()} - {"class_params"}:  # times, folders, a random name: other bytes each time
            del facts[name]
        path = self.folder / "model.cbm"
        self.booster.save_model(str(path))
        return [path.read_bytes()]

    def memory(self):
        # A model cannot be read from a snapshot without its rows: both are kept.
        return {"snapshot": self.snapshot.read_bytes()}

    def restore(self, part, rounds):
        self.snapshot.write_bytes(part["snapshot"])
        self.restored = True
