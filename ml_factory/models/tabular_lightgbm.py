"""LightGBM (Ke et al. 2017), deterministic and column-wise, in blocks."""

import lightgbm as lgb

from ml_factory.models.tabular import BlockListBooster, BlockListTrainer, LeafSizeSpec
from ml_factory.seeding import derive_seed

_METRIC = "multi_logloss"


class LightGBM(BlockListBooster):
    """Three trees a round; x_NF float32, NaN missing.

    Scores are float64, passed to each block as its `init_score`. Without them the first block starts from the classes'
    shares, and has them in its first trees.
    """

    Spec = LeafSizeSpec
    name = "lightgbm"
    library = "lightgbm"

    def _trainer(self, spec, train, valid):
        params, parts = self._params(spec), [train, *([] if valid is None else [valid])]
        bins = [lgb.Dataset(train.x, train.target, weight=train.weight, params=params)]
        if valid is not None:
            bins.append(bins[0].create_valid(valid.x, valid.target, weight=valid.weight, params=params))
        bins = [part.construct() for part in bins]
        return BlockListTrainer(self, spec, bins, [part.x for part in parts], [part.offset for part in parts])

    def _params(self, spec: LeafSizeSpec) -> dict:
        return {
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
            "force_col_wise": True,  # what LightGBM finds faster; row-wise copies the bins for each block
            "feature_pre_filter": False,
            "verbosity": -1,
            "num_threads": spec.thread_count,
        }

    def _train_block(self, spec, bins, scores, rounds, seed):
        for dataset, score in zip(bins, scores, strict=True):
            dataset.set_field("init_score", None if score is None else score.ravel(order="F"))
        # Not `seed`: it would set the seed of the bins too, and LightGBM would bin the rows again.
        seeds = {"bagging_seed": seed, "feature_fraction_seed": derive_seed(seed, "columns")}
        losses: dict = {}
        block = lgb.train(
            {**self._params(spec), **seeds}, bins[0], rounds, bins, ["train", "valid"][: len(bins)],
            callbacks=[lgb.record_evaluation(losses)], keep_training_booster=True,
        )  # fmt: skip
        return block, losses["train"][_METRIC], losses.get("valid", {}).get(_METRIC, [])

    def _add(self, scores, block, x):
        own = block.predict(x, raw_score=True, num_threads=self.settings.thread_count)
        return own if scores is None else scores + own

    def _to_bytes(self, block, rounds=None):
        return block.model_to_string(num_iteration=rounds or -1).encode()

    def _from_bytes(self, data):
        return lgb.Booster(model_str=data.decode())

    def _gain(self):
        return sum(block.feature_importance("gain") for block in self._predictor)
