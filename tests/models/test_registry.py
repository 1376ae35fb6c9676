import subprocess
import sys

import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import available_models, build_model_from_state, find_model_spec, resolve_registry_entry


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


@pytest.mark.parametrize("name", available_models())
def test_locate_of_every_model_spec_returns_types(name):
    spec = find_model_spec(name)
    assert isinstance(resolve_registry_entry(spec.estimator), type)
    assert spec.network is None or isinstance(resolve_registry_entry(spec.network), type)


def test_spec_of_misspelt_name_error_suggests_model():
    with pytest.raises(SettingsError, match="did you mean 'xgboost'"):
        find_model_spec("xgbost")
    with pytest.raises(SettingsError, match="one of your own is known once register_model has run"):
        find_model_spec("mine")  # whose letters are nearest to those of "linear"
    with pytest.raises(CheckpointError, match="Not a model's state"):
        build_model_from_state({"weights": {}})


@pytest.mark.parametrize("step", (1, -1))
def test_build_model_imports_only_modules_of_that_model(step):
    code = (
        "import sys; from ml_factory.models.registry import available_models, build_model; available_models();"
        "assert not {'torch', 'xgboost', 'lightgbm', 'catboost'} & set(sys.modules);"
        f"[(build_model(name), print(name, *sys.modules)) for name in available_models()[::{step}]]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    absent = {module for name in available_models() for module in modules_of(name)}
    for line in done.stdout.splitlines():
        name, *loaded = line.split()
        absent -= modules_of(name)
        assert not absent & set(loaded) and modules_of(name) <= set(loaded)
    assert not absent


def modules_of(name: str) -> set[str]:
    spec = find_model_spec(name)
    return {dotted.partition(":")[0] for dotted in (spec.network, spec.estimator) if dotted}
