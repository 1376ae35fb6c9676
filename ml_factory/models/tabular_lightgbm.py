"""LightGBM (Ke et al. 2017), deterministic and row-wise, in blocks."""

import lightgbm as lgb

from ml_factory.models.tabular import Booster, BoosterSpec, Grower, Rows

_METRIC = "multi_logloss"


class LightGBM(Booster):
    """Three trees a round; x_NF float32, NaN missing."""

    name = "lightgbm"
    library = "lightgbm"

    def _open(self, spec, train, valid):
        return _Grower(spec, train, valid)

    def _read(self, model):
        return lgb.Booster(model_str=model.decode())

    def _predict(self, x):
        return self._predictor.predict(x, num_threads=self.settings.thread_count)


class _Grower(Grower):
    def __init__(self, spec: BoosterSpec, train: Rows, valid: Rows | None):
        self.params = {
            "objective": "multiclass",
            "num_class": 3,
            "metric": _METRIC,
            "learning_rate": spec.learning_rate,
            "max_depth": spec.depth,
            "num_leaves": min(2**spec.depth, 131_072),
            "bagging_fraction": spec.row_sample,
            "bagging_freq": 1,
            "feature_fraction": spec.column_sample,
            "min_data_in_leaf": int(spec.min_leaf),
            "lambda_l2": spec.l2,
            "deterministic": True,
            "force_row_wise": True,
            "num_threads": spec.thread_count,
            "verbosity": -1,
        }
        # Raw data are kept: each block adds the earlier trees' scores to the rows anew.
        keep = {"free_raw_data": False, "params": self.params}
        self.train = lgb.Dataset(train.x, train.target, weight=train.weight, **keep)
        self.valid = None
        if valid is not None:
            self.valid = lgb.Dataset(valid.x, valid.target, weight=valid.weight, reference=self.train, **keep)
        self.text = ""

    def grow(self, first, until, seed):
        losses: dict = {}
        booster = lgb.train(
            {**self.params, "seed": seed},
            self.train,
            until - first,
            valid_sets=[self.train] + ([] if self.valid is None else [self.valid]),
            valid_names=["train"] + ([] if self.valid is None else ["valid"]),
            # Always through text, so that a run that goes on and one that starts again do the same.
            init_model=lgb.Booster(model_str=self.text) if self.text else None,
            callbacks=[lgb.record_evaluation(losses)],
        )
        self.text = booster.model_to_string(num_iteration=-1)
        return losses["train"][_METRIC], losses.get("valid", {}).get(_METRIC, [])

    def part(self):
        return {"text": self.text.encode()}

    def restore(self, part, rounds):
        self.text = bytes(part["text"]).decode()

    def model(self, rounds):
        return lgb.Booster(model_str=self.text).model_to_string(num_iteration=rounds).encode()
