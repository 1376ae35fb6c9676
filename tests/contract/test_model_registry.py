import subprocess
import sys

import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import available_models
from tests.contract.doors import BOOSTERS, build_model_from_state, find_model_spec, model_state_from_checkpoint


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
    with pytest.raises(CheckpointError, match="no model's state"):
        build_model_from_state({"weights": {}})
    with pytest.raises(CheckpointError, match=r"Another version.*got format 1.*train --model xgboost --fresh"):
        model_state_from_checkpoint({"model": "xgboost", "settings": {"gone": 1}}, {})


def test_build_model_imports_only_modules_of_that_model():
    built = ["linear", "lightgbm", "patchtst"]
    code = f"import sys; from ml_factory.models.registry import build_model\nfor name in {built}: build_model(name); "
    done = subprocess.run(
        [sys.executable, "-c", code + "print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    absent = set().union(*map(modules_of, available_models()))
    for name, loaded in zip(built, done.stdout.splitlines(), strict=True):
        absent -= modules_of(name)
        assert modules_of(name) <= set(loaded.split()) and not absent & set(loaded.split()), name


def modules_of(name: str) -> set[str]:
    """Modules that no other kind of model may import."""
    spec = find_model_spec(name)
    parts = spec.network, spec.estimator, "torch" if spec.windowed else name * (name in BOOSTERS)
    return {dotted.partition(":")[0] for dotted in parts if dotted}
