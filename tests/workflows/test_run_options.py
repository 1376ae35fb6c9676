"""Options of runs: names that do not exist, or mean nothing to a verb, are refused with the right spelling."""

import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from ml_factory.workflows.run_options import RunOptions, run_options


def test_run_options_of_known_names_holds_their_values():
    assert run_options({"seed": 3, "quick": True}) == RunOptions(seed=3, quick=True)


@pytest.mark.parametrize(("given", "unused", "words"), [
    ({"quik": True}, (), "did you mean 'quick'"),
    ({"source": "wandb"}, ("source",), "There is no such argument"),
    ({"seed": -1}, (), "SEED cannot be used"),
    ({"source": "there"}, (), "registry or wandb"),
])  # fmt: skip
def test_run_options_of_a_wrong_name_or_value_is_refused(given, unused, words):
    with pytest.raises(SettingsError, match=words):
        run_options(given, unused)


def test_cross_validate_with_a_source_is_refused(prepared):
    with pytest.raises(SettingsError, match=r"no such argument.*source"):
        pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", source="wandb")


def test_cross_validate_with_a_scheme_spec_uses_its_window(prepared):
    scheme = pipeline.SchemeSpec("walk_forward_rolling", 2, window=300)
    settings = {"rounds": 2, "depth": 2}
    found = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", scheme=scheme, model_settings=settings, quick=True)
    assert found.scheme == "walk_forward_rolling" and found.fold_table["train"].max() <= 300
