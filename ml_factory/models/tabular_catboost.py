"""CatBoost (Prokhorenkova et al. 2018) with symmetric trees, in blocks."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import catboost
import numpy as np

from ml_factory.models.rows import CLASSES, TrainingRows
from ml_factory.models.tabular import BlockListBooster, BlockListTrainer, TabularBoosterSpec

_METRIC = "MultiClass"


@dataclass(frozen=True)
class _CatBoostSpec(TabularBoosterSpec):
    """Settings of CatBoost. Symmetric trees, which split each level by one condition, are deeper than those of the
    others.
    """

    depth: int = 5


class CatBoost(BlockListBooster):
    """One symmetric tree of three outputs a round; x_NF float32, NaN missing.

    Scores are float64, passed to each block as the baseline of its rows.
    """

    Spec = _CatBoostSpec
    name = "catboost"
    library = "catboost"

    def _trainer(self, spec, train, valid):
        parts = [_with_all_classes(train), *([] if valid is None else [valid])]
        columns = [np.asfortranarray(part.x) for part in parts]  # which pools read in place; others they copy
        pools = [catboost.Pool(x, part.target, weight=part.weight) for x, part in zip(columns, parts, strict=True)]
        inputs = [catboost.Pool(x) for x in columns]  # once: from an array each prediction builds its own
        with tempfile.TemporaryDirectory() as folder:
            borders = str(Path(folder, "borders"))
            pools[0].quantize()
            pools[0].save_quantization_borders(borders)
            for pool in pools[1:]:
                pool.quantize(input_borders=borders)
        return BlockListTrainer(self, spec, pools, inputs, [part.offset for part in parts])

    def _params(self, spec: TabularBoosterSpec) -> dict:
        drawn = {"bootstrap_type": "Bernoulli", "subsample": spec.row_sample}
        return {
            "loss_function": _METRIC,
            "classes_count": len(CLASSES),
            "learning_rate": spec.learning_rate,
            "depth": min(spec.depth, 16),
            **(drawn if spec.row_sample < 1 else {"bootstrap_type": "No"}),
            "rsm": spec.column_sample,
            "l2_leaf_reg": spec.l2,
            "thread_count": spec.thread_count,
            "use_best_model": False,
            "logging_level": "Silent",
            "allow_writing_files": False,
        }

    def _train_block(self, spec, bins, scores, rounds, seed):
        for pool, score in zip(bins, scores, strict=True):
            if score is not None:
                pool.set_baseline(score)
        block = catboost.CatBoost({**self._params(spec), "iterations": rounds, "random_seed": seed})
        block.fit(bins[0], eval_set=bins[1:] or None)
        losses = block.get_evals_result()
        return block, losses["learn"][_METRIC], losses.get("validation", {}).get(_METRIC, [])

    def _add(self, scores, block, x):
        own = block.predict(x, prediction_type="RawFormulaVal", thread_count=self.settings.thread_count)
        return own if scores is None else scores + own

    def _to_bytes(self, block, rounds=None):
        if rounds is not None:
            block.shrink(rounds)
        facts = block.get_metadata()
        for name in {*facts.keys()} - {"class_params"}:  # times, a random name: other bytes each time
            del facts[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.cbm")
            block.save_model(str(path))
            return path.read_bytes()

    def _from_bytes(self, data):
        return catboost.CatBoost().load_model(blob=data)

    def _gain(self):
        # CatBoost keeps no gains of splits; this is the mean change of the score across a split.
        return catboost.sum_models(self._predictor).get_feature_importance(type="PredictionValuesChange")


def _with_all_classes(rows: TrainingRows) -> TrainingRows:
    """Return the rows, and for each class they lack one of weight 0: CatBoost refuses a baseline of an absent class."""
    absent = np.setdiff1d(np.arange(len(CLASSES)), rows.target)
    take = np.r_[np.arange(len(rows.x)), np.zeros(len(absent), np.int64)]
    return TrainingRows(
        rows.x[take], np.r_[rows.target, absent], np.r_[rows.weight, np.zeros(len(absent))],
        None if rows.offset is None else rows.offset[take],
    ) if len(absent) else rows  # fmt: skip
