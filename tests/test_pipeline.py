"""The pipeline from end to end on a small market: nothing done twice, nothing lost, the same bits again."""

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.checkpoints.manager import PhaseCheckpoints
from ml_factory.errors import NotPreparedError
from ml_factory.settings import QuickLimits
from ml_factory.workflows import prepared_dataset
from tests.contract.test_pipeline import H, Killed, P, content, train
from tests.tracking.metrics_table import read_log


def test_train_on_features_of_changed_code_raises_not_prepared(prepared, monkeypatch):
    monkeypatch.setattr(prepared_dataset, "source_hash", lambda packages: "0" * 64)
    with pytest.raises(NotPreparedError, match=r"code .* changed since the last prepare"):
        train(prepared)


def test_train_killed_between_save_and_log_logs_epoch_once(prepared, monkeypatch, model="lstm"):
    """The log has that epoch once, all the same."""
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    save, saved = PhaseCheckpoints.save, []

    def dying(self, *words, **options):
        saved.append(save(self, *words, **options))
        if len(saved) == 2:
            raise Killed
        return saved[-1]

    monkeypatch.setattr(PhaseCheckpoints, "save", dying)
    with pytest.raises(Killed):
        train(prepared, model)
    monkeypatch.setattr(PhaseCheckpoints, "save", save)
    again = train(prepared, model)
    assert again.resumed_from == 2
    log = read_log(prepared.results / "DEMO" / again.run_id / "log")
    assert list(log["step"]) == [1, 2, 3] and np.array_equal(log["val_loss"], again.history["val_loss"])


def test_train_quick_limits_rounds_of_booster_and_rows_of_network(prepared, monkeypatch):
    monkeypatch.setattr(prepared_dataset, "QuickLimits", lambda: QuickLimits(sequence_rows=60))
    before = content(prepared.processed("DEMO")) | content(prepared.raw)
    quick = train(prepared, quick=True, model_settings={"depth": 3})
    full = train(prepared, model_settings={"depth": 3, "rounds": 30})
    booster, same = (pipeline.load_predictions(prepared, "DEMO", H, "xgboost", one.run_id)[P] for one in (quick, full))
    assert quick.limited == {"rounds": 30} and booster.equals(same)  # all training rows, in fewer rounds
    network = train(prepared, model="lstm", quick=True)
    printed = pipeline.load_predictions(prepared, "DEMO", H, "lstm")["split"].value_counts()
    of_all = pipeline.load_predictions(prepared, "DEMO", H, "xgboost")["split"].value_counts()
    assert network.limited["training rows"].startswith("60 of ") and printed["train"] == 60 < of_all["train"]
    assert network.limited["validation rows of stopping and calibration"].startswith("60 of ")
    assert printed["test"] > 0.8 * of_all["test"]  # all with a whole window
    assert "QUICK limited" in quick.summary() and "QUICK limited" in quick.report_path.read_text(encoding="utf-8")
    assert content(prepared.processed("DEMO")) | content(prepared.raw) == before
    assert (
        "rounds" not in train(prepared, quick=True, model_settings={"depth": 3, "rounds": 5}).limited
    )  # our own limit
    assert full.limited == {} and "QUICK" not in full.report_path.read_text(encoding="utf-8")
    assert "-quick-" in quick.run_id and "-quick" not in full.run_id
    assessed = {one.run_id: one.metrics.set_index(["split", "name"])["rows"] for one in (quick, full)}
    assert assessed[quick.run_id].loc[:, "prior"].equals(assessed[full.run_id].loc[:, "prior"])  # the same rows judge
