"""XGBoost (Chen and Guestrin 2016) by histograms, in blocks."""

from dataclasses import dataclass

import numpy as np
import xgboost as xgb

from ml_factory.argument_checks import check_settings
from ml_factory.models.tabular import BlockListBooster, BlockListTrainer, LeafSizeSpec

_METRIC = "mlogloss"
_BASE = np.float32(0.5)  # a given base score keeps the first block from estimating one that later blocks would not
_FEW_ROWS = 64


@dataclass(frozen=True)
class _XGBoostSpec(LeafSizeSpec):
    """Settings of XGBoost.

    device : cpu or cuda. Equal to the bit after an interruption is promised on the cpu alone; results of a GPU carry
        the mark.
    """

    device: str = "cpu"

    def __post_init__(self):
        super().__post_init__()
        check_settings(self, device=("cpu", "cuda"))


class XGBoost(BlockListBooster):
    """Three trees a round; x_NF float32, NaN missing.

    Scores are float32, passed to each block as its `base_margin`: a cached score and one predicted again are the same
    additions in the same order.
    """

    Spec = _XGBoostSpec
    name = "xgboost"
    library = "xgboost"

    def _environment(self, spec):
        return super()._environment(spec) | {"device": spec.device}

    def _trainer(self, spec, train, valid):
        threads = {"nthread": spec.thread_count}
        bins = [xgb.QuantileDMatrix(train.x, train.target, weight=train.weight, **threads)]
        if valid is not None:
            bins.append(xgb.QuantileDMatrix(valid.x, valid.target, weight=valid.weight, ref=bins[0], **threads))
        offsets = [part.offset for part in (train, valid) if part is not None]
        scores = [None if offset is None else offset.astype(np.float32) + _BASE for offset in offsets]
        return BlockListTrainer(self, spec, bins, bins, scores)

    def _params(self, spec: _XGBoostSpec) -> dict:
        return {
            "objective": "multi:softprob",
            "num_class": 3,
            "eval_metric": _METRIC,
            "tree_method": "hist",
            "device": spec.device,
            "eta": spec.learning_rate,
            "max_depth": spec.depth,
            "subsample": spec.row_sample,
            "colsample_bytree": spec.column_sample,
            # XGBoost's child weight is a sum of hessians, p(1 - p) <= 1/4 a row, so a quarter of a count of rows.
            "min_child_weight": spec.min_leaf / 4,
            "lambda": spec.l2,
            "base_score": _BASE,
            "nthread": spec.thread_count,
        }

    def _train_block(self, spec, bins, scores, rounds, seed):
        for matrix, score in zip(bins, scores, strict=True):
            if score is not None:
                matrix.set_base_margin(score)
        # Not `xgb.train`: the model it returns has forgotten the scores of these rows.
        block = xgb.Booster(self._params(spec) | {"seed": seed}, bins)
        losses: tuple[list, list] = ([], [])
        for number in range(rounds):
            block.update(bins[0], number)
            line = block.eval_set(list(zip(bins, ("train", "valid"), strict=False)), number)
            for values, part in zip(losses, line.split("\t")[1:], strict=False):
                values.append(float(part.rpartition(":")[2]))
        return block, *losses

    def _add(self, scores, block, x):
        if isinstance(x, np.ndarray):
            return block.inplace_predict(x, base_margin=scores, predict_type="margin")
        if scores is not None:
            x.set_base_margin(scores)
        return block.predict(x, output_margin=True)

    def _margins(self, x):
        # For a row of a feed one matrix costs less than an array handed to each block; equal to the bit.
        return super()._margins(xgb.DMatrix(x, nthread=1) if len(x) <= _FEW_ROWS else x)

    def _to_bytes(self, block, rounds=None):
        return bytes(block[:rounds].save_raw("ubj"))

    def _from_bytes(self, data):
        return xgb.Booster({"nthread": self.settings.thread_count}, model_file=bytearray(data))

    def _gain(self):
        gain = np.zeros(self.n_features)
        for block in self._predictor:
            for column, value in block.get_score(importance_type="total_gain").items():
                gain[int(column[1:])] += value
        return gain
