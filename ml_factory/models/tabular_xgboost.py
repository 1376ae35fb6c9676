"""XGBoost (Chen and Guestrin 2016) by histograms, in blocks."""

import numpy as np
import xgboost as xgb

from ml_factory.models.tabular import TabularBlockTrainer, TabularModel
from ml_factory.models.tabular_spec import TabularBoosterSpec
from ml_factory.models.xgboost_trees import merge_xgboost_trees, xgboost_booster_from_trees, xgboost_tree_arrays

_METRIC = "mlogloss"
_BASE = 0.5  # a given base score keeps the first block from estimating one that later blocks would not


class XGBoost(TabularModel):
    """Three trees a round; x_NF float32, NaN missing."""

    name = "xgboost"
    library = "xgboost"

    def _bin(self, spec, train, valid):
        device = {"nthread": spec.thread_count}
        bins = [xgb.QuantileDMatrix(train.x, train.target, weight=train.weight, **device)]
        if valid is not None:
            bins.append(xgb.QuantileDMatrix(valid.x, valid.target, weight=valid.weight, ref=bins[0], **device))
        return bins

    def _open(self, spec, train, valid, bins):
        offsets = [part.offset for part in (train, valid) if part is not None]
        return _Trainer(spec, bins, "cuda" if self._on_gpu(spec) else "cpu", offsets)

    def _grown(self, part, rounds):
        return merge_xgboost_trees(part["blocks"], rounds)

    def _read(self, fitted):
        return xgboost_booster_from_trees(fitted, self.n_features, self.settings.thread_count)

    def _predict(self, x):
        return self._predictor.inplace_predict(x)

    def _scores(self, x):
        return self._predictor.inplace_predict(x, predict_type="margin")

    def _gain(self):
        scores = self._predictor.get_score(importance_type="total_gain")
        return np.array([scores.get(f"f{column}", 0.0) for column in range(self.n_features)])


class _Trainer(TabularBlockTrainer):
    """XGBoost in blocks: each block is a booster of its own that starts from the rows' scores so far (`base_margin`).

    A cached score and one predicted again are the same float32 additions in the same order.
    """

    def __init__(
        self, spec: TabularBoosterSpec, bins: list[xgb.QuantileDMatrix], device: str, offsets: list[np.ndarray | None]
    ):
        self.params = {
            "objective": "multi:softprob",
            "num_class": 3,
            "eval_metric": _METRIC,
            "tree_method": "hist",
            "device": device,
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
        self.evals = list(zip(bins, ("train", "valid"), strict=False))
        self.margins = [np.full((matrix.num_row(), 3), _BASE, np.float32) for matrix in bins]
        for margin, offset in zip(self.margins, offsets, strict=True):
            if offset is not None:
                margin += offset.astype(np.float32)
        self.blocks: list[dict[str, np.ndarray]] = []

    def grow(self, first, until, seed):
        losses: dict = {}
        self._start_from_margins()
        booster = xgb.train(
            {**self.params, "seed": seed},
            self.evals[0][0],
            until - first,
            evals=self.evals,
            evals_result=losses,
            verbose_eval=False,
        )
        self._take_margins(booster)
        self.blocks.append(xgboost_tree_arrays(booster))
        return losses["train"][_METRIC], losses.get("valid", {}).get(_METRIC, [])

    def resumable_state(self):
        return {"blocks": list(self.blocks)}

    def restore(self, part, rounds):
        self.blocks = [dict(block) for block in part["blocks"]]
        features = self.evals[0][0].num_col()
        for block in self.blocks:
            self._start_from_margins()
            self._take_margins(
                xgboost_booster_from_trees(block, features, self.params["nthread"], self.params["device"])
            )

    def _start_from_margins(self) -> None:
        for (matrix, _), margin in zip(self.evals, self.margins, strict=True):
            matrix.set_base_margin(margin)

    def _take_margins(self, booster: xgb.Booster) -> None:
        self.margins = [booster.predict(matrix, output_margin=True) for matrix, _ in self.evals]

    def model(self, rounds):
        return merge_xgboost_trees(self.blocks, rounds)
