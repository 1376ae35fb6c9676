"""LightGBM (Ke et al. 2017), deterministic and row-wise, in blocks."""

import lightgbm as lgb
import numpy as np

from ml_factory.errors import FactoryError
from ml_factory.models.lightgbm_trees import LightGBMModelText, compile_lightgbm_trees
from ml_factory.models.tabular import TabularBlockTrainer, TabularModel, TabularRows
from ml_factory.models.tabular_spec import TabularBoosterSpec
from ml_factory.seeding import derive_seed

_METRIC = "multi_logloss"


class LightGBM(TabularModel):
    """Three trees a round; x_NF float32, NaN missing. Its wheels see no CUDA: `device="auto"` stays on the cpu."""

    name = "lightgbm"
    library = "lightgbm"
    gpu = False

    def _bin(self, spec, train, valid):
        params = {"verbosity": -1, "feature_pre_filter": False, "force_row_wise": True, **self._device(spec)}
        bins = [lgb.Dataset(train.x, train.target, weight=train.weight, params=params)]
        if valid is not None:
            bins.append(bins[0].create_valid(valid.x, valid.target, weight=valid.weight, params=params))
        return [part.construct() for part in bins]

    def _device(self, spec: TabularBoosterSpec) -> dict:
        return {"device_type": "cuda" if self._on_gpu(spec) else "cpu", "num_threads": spec.thread_count}

    def _open(self, spec, train, valid, bins):
        return _Trainer(spec, [train, *([] if valid is None else [valid])], bins, self._device(spec))

    def _grown(self, part, rounds):
        text = LightGBMModelText.split(part["text"].decode()).join()
        return lgb.Booster(model_str=text).model_to_string(num_iteration=-1).encode()

    def _read(self, fitted):
        return compile_lightgbm_trees(LightGBMModelText.split(fitted.decode()).trees, classes=3)

    def _predict(self, x):
        return self._predictor.probabilities(x, self.settings.thread_count)

    def _scores(self, x):
        scores = np.zeros((len(x), 3))
        self._predictor.add_leaf_values(scores, x, self.settings.thread_count)
        return scores

    def _gain(self):
        return self._own_booster().feature_importance("gain")

    def _own_booster(self) -> lgb.Booster:
        return lgb.Booster(model_str=self._fitted.decode())


class _Trainer(TabularBlockTrainer):
    """LightGBM in blocks: each block is a booster of its own that starts from the rows' scores so far (`init_score`).

    Scores are kept in float64 and updated by our own tree walk, leaf after leaf: a resumed run computes the same sums
    in the same order from the text of all trees.
    """

    def __init__(self, spec: TabularBoosterSpec, rows: list[TabularRows], bins: list[lgb.Dataset], device: dict):
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
            "feature_pre_filter": False,
            "verbosity": -1,
            **device,
        }
        self.rows, self.bins = rows, bins
        self.has_no_offset = rows[0].offset is None
        self.scores = [np.zeros((len(part.x), 3)) if part.offset is None else part.offset.copy() for part in rows]
        self.text: LightGBMModelText | None = None
        self.rounds: list[int] = []  # trees up to the end of each round

    def grow(self, first, until, seed):
        for dataset, score in zip(self.bins, self.scores, strict=True):
            # Without scores the first block starts from the classes' shares, and has them in its first trees.
            dataset.set_field("init_score", score.ravel(order="F") if first or not self.has_no_offset else None)
        # Not `seed`: it would set the seed of the bins too, and LightGBM would bin the rows again.
        seeds = {"bagging_seed": seed, "feature_fraction_seed": derive_seed(seed, "columns")}
        booster = self._started({**self.params, **seeds})
        for dataset in self.bins[1:]:
            booster.add_valid(dataset, "valid")
        losses = [self._round(booster) for _ in range(first, until)]
        text = LightGBMModelText.split(booster.model_to_string(num_iteration=-1))
        begun = len(self.text.trees) if self.text else 0
        self.rounds += [begun + min(3 * number, len(text.trees)) for number in range(1, until - first + 1)]
        self._add(text.trees)
        self.text = (
            LightGBMModelText(self.text.head, self.text.trees + text.trees, self.text.tail) if self.text else text
        )
        return [train for train, _ in losses], [valid for _, valid in losses if valid is not None]

    def _started(self, params: dict) -> lgb.Booster:
        try:
            return lgb.Booster(params, self.bins[0])
        except lgb.basic.LightGBMError as error:
            if params["device_type"] == "cpu":
                raise
            raise FactoryError(
                "This LightGBM cannot use a GPU", got=str(error).splitlines()[0][:200], next_step="use device='cpu'"
            ) from error

    def _round(self, booster: lgb.Booster) -> tuple[float, float | None]:
        """Train one more tree per class; where no split is worth it LightGBM adds none, and the losses stay."""
        booster.update()
        (_, _, train, _), *others = booster.eval_train() + booster.eval_valid()
        return train, others[0][2] if others else None

    def _add(self, trees: tuple[str, ...]) -> None:
        compiled = compile_lightgbm_trees(trees, classes=3)
        for rows, score in zip(self.rows, self.scores, strict=True):
            compiled.add_leaf_values(score, rows.x, self.params["num_threads"])

    def resumable_state(self):
        return {"text": self.text.join().encode(), "rounds": list(self.rounds)}

    def restore(self, part, rounds):
        self.text = LightGBMModelText.split(part["text"].decode())
        self.rounds = [int(number) for number in part["rounds"]]
        ends = [0, *self.rounds, len(self.text.trees)]
        if len(self.rounds) != rounds or sorted(ends) != ends or not self.text.trees:
            raise ValueError(f"{len(self.rounds)} rounds, not {rounds}, of {len(self.text.trees)} trees")
        self._add(self.text.trees)

    def model(self, rounds):
        kept = LightGBMModelText(self.text.head, self.text.trees[: self.rounds[rounds - 1]], self.text.tail)
        return lgb.Booster(model_str=kept.join()).model_to_string(num_iteration=-1).encode()
