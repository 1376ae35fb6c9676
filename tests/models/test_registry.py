import subprocess
import sys

import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import (
    BOOSTERS,
    available_models,
    build_model_from_state,
    find_model_spec,
    model_state_from_checkpoint,
)


def test_available_models_have_expected_families_and_notebooks():
    families = {"tabular": [], "sequence": [], "advanced": []}
    for name in available_models():
        families[find_model_spec(name).family].append(name)
        assert (
            find_model_spec(name).notebook[:2]
            == {"tabular": "02", "sequence": "03", "advanced": "04"}[find_model_spec(name).family]
        )
        assert find_model_spec(name).windowed is (find_model_spec(name).family != "tabular")
    assert {"xgboost", "lightgbm", "catboost"} <= set(families["tabular"])
    assert families["sequence"] == ["lstm", "gru", "tcn"]
    assert families["advanced"] == ["patchtst", "itransformer", "tft"]


def test_spec_of_misspelt_name_error_suggests_model():
    with pytest.raises(SettingsError, match="did you mean 'xgboost'"):
        find_model_spec("xgbost")
    with pytest.raises(SettingsError, match="one of your own is known once register_model has run"):
        find_model_spec("mine")  # whose letters are nearest to those of "linear"
    with pytest.raises(CheckpointError, match="Not a model's state"):
        build_model_from_state({"weights": {}})
    with pytest.raises(CheckpointError, match=r"Another version.*got format 1.*train --model xgboost --fresh"):
        model_state_from_checkpoint({"model": "xgboost", "settings": {"gone": 1}}, {})


def test_build_model_imports_only_modules_of_that_model():
    """Boosters first in a fork, where torch is absent; then networks first, where the boosters' libraries are."""
    code = (
        "import os, sys; from ml_factory.models.registry import BOOSTERS, available_models, build_model\n"
        "names = available_models()[::-1] if os.fork() and os.wait() else ['linear', *BOOSTERS]\n"
        "[(build_model(name), print(name, *sys.modules)) for name in names]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == ["linear", *BOOSTERS, *available_models()[::-1]]
    for order in (lines[: 1 + len(BOOSTERS)], lines[1 + len(BOOSTERS) :]):
        absent = {module for name in available_models() for module in modules_of(name)}
        for name, *loaded in order:
            absent -= modules_of(name)
            assert not absent & set(loaded) and modules_of(name) <= set(loaded), name
    assert not absent


def modules_of(name: str) -> set[str]:
    """Modules that no other kind of model may import. The library of a booster may: CatBoost imports XGBoost."""
    spec = find_model_spec(name)
    return {dotted.partition(":")[0] for dotted in (spec.network, spec.estimator, spec.windowed and "torch") if dotted}
