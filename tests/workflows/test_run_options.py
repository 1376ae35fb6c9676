"""Options of runs: names that do not exist, or mean nothing to a verb, are refused with the right spelling."""

import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from ml_factory.workflows.runs.run_options import RunOptions, build_run_options


def test_run_options_of_known_names_keep_values():
    assert build_run_options({"seed": 3, "quick": True}) == RunOptions(seed=3, quick=True)


@pytest.mark.parametrize(("given", "unused", "words"), [
    ({"quik": True}, (), "did you mean 'quick'"),
    ({"source": "wandb"}, ("source",), "There is no such argument"),
    ({"seed": -1}, (), "SEED cannot be used"),
    ({"source": "there"}, (), "registry or wandb"),
])  # fmt: skip
def test_run_options_of_unknown_name_or_value_raise(given, unused, words):
    with pytest.raises(SettingsError, match=words):
        build_run_options(given, unused)


def test_cross_validate_with_source_option_raises(prepared):
    with pytest.raises(SettingsError, match=r"no such argument.*source"):
        pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", source="wandb")


@pytest.mark.parametrize("verb", ["cross_validate", "stack"])
def test_cross_validate_and_stack_in_second_rank_raise_and_write_nothing(verb, prepared, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    models = "xgboost" if verb == "cross_validate" else ("xgboost", "linear")
    with pytest.raises(SettingsError, match="Only train runs as several processes"):
        getattr(pipeline, verb)(prepared, "DEMO", 5, models)
    assert not list(prepared.results.rglob("run.json"))


def test_stack_passes_options_except_fresh_and_run_to_base_models(prepared, monkeypatch):
    class Done(Exception):
        pass

    def trained(*given, **options):
        calls.append(options)
        raise Done

    calls = []
    monkeypatch.setattr(pipeline, "train", trained)
    options = {"seed": 3, "quick": True, "source": "wandb", "mirror": "off", "fresh": True, "run": "a"}
    with pytest.raises(Done):
        pipeline.stack(prepared, "DEMO", 5, ("xgboost", "linear"), folds=2, **options)
    assert calls == [{"seed": 3, "quick": True, "source": "wandb", "mirror": "off", "model_settings": None}]


def test_cross_validate_with_scheme_spec_uses_window(prepared):
    scheme = pipeline.FoldSchemeSpec("walk_forward_rolling", 2, window=300)
    settings = {"rounds": 2, "depth": 2}
    found = pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", scheme=scheme, model_settings=settings, quick=True)
    assert found.scheme == "walk_forward_rolling" and found.fold_table["train"].max() <= 300
