"""What results hold and print: facts as attributes and as JSON, the verdict last, in a sentence and four numbers."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.verdict import ModelVerdict, model_verdict, verdict_gains_of_rows
from ml_factory.result import Result

RNG = np.random.default_rng(1)


def verdict_of(kind: str = "triple_barrier") -> ModelVerdict:
    y, times = RNG.integers(-1, 2, 900), pd.date_range("2024-01-02", periods=900, freq="2h", tz="UTC")
    flat = {name: np.full((900, 3), 1 / 3) for name in BASELINES}
    gains = verdict_gains_of_rows(y, RNG.dirichlet((3, 3, 3), 900), flat, horizon=2, times_N=times)
    return model_verdict("xgboost", gains, "clock", rows=900, effective_rows=451.2, kind=kind)


def test_result_holds_facts_and_prints_them_as_json():
    table = pd.DataFrame({"loss": [0.5, np.nan]}, index=pd.Index(["a", "b"], name="name"))
    found = Result(["one", "two"], also={"frame": table}, path=Path("x/y"), table=table, verdict=verdict_of(), n=(1, 2))
    assert str(found) == found.summary() == "one\ntwo" and found.plot() is None and found.frame is table
    facts = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert list(facts) == ["path", "table", "verdict", "n"] and facts["path"] == "x/y" and facts["n"] == [1, 2]
    assert facts["table"] == [{"name": "a", "loss": 0.5}, {"name": "b", "loss": None}]
    assert facts["verdict"]["sentence"] == found.verdict.sentence
    with pytest.raises(AttributeError, match="no losses; it has frame, path, table"):
        print(found.losses)
