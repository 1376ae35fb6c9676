"""A fixed, small form of benchmarks/edge.py: the edge that was planted is found, and none where there is none."""

import pytest

from benchmarks.edge import evaluated, rows_of
from ml_factory.models.registry import build_model

SMALL = {"lightgbm": {}, "lstm": {"epochs": 4}}


@pytest.fixture(scope="module", params=["planted", "null"])
def rows(request):
    return rows_of(request.param, seed=0, days=60)


@pytest.mark.soak
@pytest.mark.parametrize("name", SMALL)
def test_edge_benchmark_models_find_half_of_planted_edge_and_none_in_null(rows, name):
    found = evaluated(rows, build_model(name, threads=1, **SMALL[name]))
    if rows.market.spec.kind == "planted":
        assert found["oracle"] > 0.1 and 0.5 < found["share"] < 1, found
    else:
        assert found["errors"] < 2, found
