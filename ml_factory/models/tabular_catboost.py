"""CatBoost (Prokhorenkova et al. 2018) with symmetric trees, in blocks, through its own snapshot file.

`init_model` starts a new generator and new approximants; the snapshot file (CatBoost's own binary, no pickle) keeps
both. A block is a training whose number of iterations has grown and which finds the snapshot of the block before.
"""

import json
import tempfile
from pathlib import Path

import catboost

from ml_factory.errors import CheckpointError
from ml_factory.models.tabular import Booster, BoosterSpec, Grower, Rows

_METRIC = "MultiClass"
_NEVER = 10**9  # seconds: the file is written when a block ends, and only then
# Times, folders and random identifiers inside the model file: without them equal models are equal bytes.
_CHANGING = ("train_finish_time", "model_guid", "output_options")
_FOLDERS = ("train_dir", "snapshot_file")


class CatBoost(Booster):
    """One symmetric tree of three outputs a round; x_NF float32, NaN missing."""

    name = "catboost"
    library = "catboost"

    def _open(self, spec, train, valid):
        return _Grower(spec, train, valid)

    def _read(self, model):
        return catboost.CatBoost().load_model(blob=model)

    def _predict(self, x):
        return self._predictor.predict(x, prediction_type="Probability", thread_count=self.settings.thread_count)


class _Grower(Grower):
    def __init__(self, spec: BoosterSpec, train: Rows, valid: Rows | None):
        self.folder = tempfile.TemporaryDirectory(prefix="catboost-")
        self.snapshot = Path(self.folder.name) / "snapshot.cbsnapshot"
        self.params = {
            "loss_function": _METRIC,
            "classes_count": 3,
            "learning_rate": spec.learning_rate,
            "depth": min(spec.depth, 16),
            "bootstrap_type": "Bernoulli" if spec.row_sample < 1 else "No",
            "rsm": spec.column_sample,
            "l2_leaf_reg": spec.l2,
            "random_seed": spec.seed,
            "thread_count": spec.thread_count,
            "use_best_model": False,
            "logging_level": "Silent",
            "train_dir": self.folder.name,
            "save_snapshot": True,
            "snapshot_file": str(self.snapshot),
            "snapshot_interval": _NEVER,
        }
        if spec.row_sample < 1:
            self.params["subsample"] = spec.row_sample
        self.train = catboost.Pool(train.x, train.target, weight=train.weight)
        self.valid = None if valid is None else catboost.Pool(valid.x, valid.target, weight=valid.weight)
        self.booster, self.callbacks = None, None

    def grow(self, first, until, seed):
        # The seed of a block is not used: the snapshot carries the generator itself.
        self._train(until)
        losses = self.booster.get_evals_result()
        return losses["learn"][_METRIC][first:], losses.get("validation", {}).get(_METRIC, [])[first:]

    def _train(self, until: int) -> None:
        self.booster = catboost.CatBoost({**self.params, "iterations": until})
        self.booster.fit(self.train, eval_set=self.valid, callbacks=self.callbacks)

    def part(self):
        return {"snapshot": self.snapshot.read_bytes()}

    def restore(self, part, rounds):
        self.snapshot.write_bytes(bytes(part["snapshot"]))
        try:
            self._train(rounds)
        except catboost.CatBoostError as error:
            raise CheckpointError(
                "CatBoost cannot go on from the snapshot in this checkpoint",
                got=str(error).splitlines()[0][:200],
                next_step="train afresh (FRESH=True, --fresh)",
            ) from error

    def model(self, rounds):
        if rounds < self.booster.tree_count_:
            self.booster.shrink(rounds)
        metadata = self.booster.get_metadata()
        for name in _CHANGING:
            metadata[name] = ""
        params = json.loads(metadata["params"])
        params["flat_params"] = {k: v for k, v in params.get("flat_params", {}).items() if k not in _FOLDERS}
        metadata["params"] = json.dumps(params, sort_keys=True)
        path = Path(self.folder.name) / "model.cbm"
        self.booster.save_model(str(path))
        return path.read_bytes()

    def close(self):
        self.folder.cleanup()
