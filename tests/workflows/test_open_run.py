"""What a verb begins with: the run that is meant, and nothing said of a run that cannot begin."""

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.errors import FactoryError, NotPreparedError

SMALL = {"epochs": 1, "width": 4, "lookback": 6, "threads": 1}
LEARNT = SMALL | {"offset": "none"}  # an epoch that is no better than the clock would leave two models of the clock
P = ["p_short", "p_neutral", "p_long"]


def test_predictions_and_explanation_of_older_run_ignore_newer_run(prepared):
    """A notebook that is run again finds its finished run; another of other settings may have come in between."""
    first, second = (
        pipeline.train(prepared, "DEMO", 5, "tft", seed=seed, quick=True, model_settings=LEARNT) for seed in (0, 1)
    )
    newest = pipeline.load_predictions(prepared, "DEMO", 5, "tft")[P].to_numpy()
    printed = {}
    for one in (first, second):
        frame = pipeline.load_predictions(prepared, "DEMO", 5, "tft", one.run_id)
        predicted = pipeline.predict(prepared, "DEMO", 5, "tft", run=one.run_id, all_rows=True)
        np.testing.assert_allclose(predicted.frame.loc[frame.index, P], frame[P], rtol=0, atol=1e-6)
        assert predicted.run_id == one.run_id and one.run_id in predicted.summary()
        looked_at = pipeline.explain(prepared, "DEMO", 5, "tft", rows=20, run=one.run_id).shares["share"]
        printed[one.run_id] = frame[P].to_numpy(), looked_at.sort_index().to_numpy()
    assert (printed[second.run_id][0] == newest).all()
    assert all(abs(one - other).max() > 1e-3 for one, other in zip(*printed.values(), strict=True))
    for ask in (pipeline.load_predictions, pipeline.predict, pipeline.explain):
        with pytest.raises(
            NotPreparedError, match=rf"got train-tft-h5-nobody.*wanted one of {first.run_id}, {second.run_id}"
        ):
            ask(prepared, "DEMO", 5, "tft", run="train-tft-h5-nobody")


@pytest.mark.parametrize("settings", [{"dropuot": 0.2}, {"dropout": "abc"}, {"lookback": 10**6}])
def test_train_with_refused_settings_reports_no_status_and_opens_no_run(settings, prepared):
    received = []
    with pytest.raises(FactoryError):
        pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings=settings, on_status=received.append)
    assert not received and not list(prepared.results.rglob("train-lstm-*"))
