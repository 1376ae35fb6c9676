"""XGBoost (Chen and Guestrin 2016) by histograms, in blocks."""

import xgboost as xgb

from ml_factory.models.tabular import Booster, BoosterSpec, Grower, Rows

_METRIC = "mlogloss"


class XGBoost(Booster):
    """Three trees a round; x_NF float32, NaN missing."""

    name = "xgboost"
    library = "xgboost"

    def _open(self, spec, train, valid):
        return _Grower(spec, train, valid)

    def _read(self, model):
        booster = xgb.Booster(model_file=bytearray(model))
        booster.set_param({"nthread": self.settings.thread_count})
        return booster

    def _predict(self, x):
        return self._predictor.inplace_predict(x)


class _Grower(Grower):
    def __init__(self, spec: BoosterSpec, train: Rows, valid: Rows | None):
        self.params = {
            "objective": "multi:softprob",
            "num_class": 3,
            "eval_metric": _METRIC,
            "tree_method": "hist",
            "eta": spec.learning_rate,
            "max_depth": spec.depth,
            "subsample": spec.row_sample,
            "colsample_bytree": spec.column_sample,
            # XGBoost's child weight is a sum of hessians, p(1 - p) <= 1/4 a row, so a quarter of a count of rows.
            "min_child_weight": spec.min_leaf / 4,
            "lambda": spec.l2,
            # A given base score keeps the first block from estimating one that later blocks would not.
            "base_score": 0.5,
            "nthread": spec.thread_count,
        }
        self.train = xgb.QuantileDMatrix(train.x, train.target, weight=train.weight, nthread=spec.thread_count)
        self.evals = [(self.train, "train")]
        if valid is not None:
            matrix = xgb.QuantileDMatrix(
                valid.x, valid.target, weight=valid.weight, ref=self.train, nthread=spec.thread_count
            )
            self.evals.append((matrix, "valid"))
        self.raw = b""

    def grow(self, first, until, seed):
        losses: dict = {}
        booster = xgb.train(
            {**self.params, "seed": seed},
            self.train,
            until - first,
            evals=self.evals,
            evals_result=losses,
            verbose_eval=False,
            # Always through bytes, so that a run that goes on and one that starts again do the same.
            xgb_model=xgb.Booster(model_file=bytearray(self.raw)) if self.raw else None,
        )
        self.raw = bytes(booster.save_raw("ubj"))
        return losses["train"][_METRIC], losses.get("valid", {}).get(_METRIC, [])

    def part(self):
        return {"raw": self.raw}

    def restore(self, part, rounds):
        self.raw = bytes(part["raw"])

    def model(self, rounds):
        booster = xgb.Booster(model_file=bytearray(self.raw))
        return bytes(booster[:rounds].save_raw("ubj"))
