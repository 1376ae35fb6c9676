import subprocess
import sys

import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import available_models, load_model, locate, spec_of


def test_names_families_and_notebooks():
    families = {"tabular": [], "sequence": [], "advanced": []}
    for name in available_models():
        families[spec_of(name).family].append(name)
        assert spec_of(name).notebook[:2] == {"tabular": "02", "sequence": "03", "advanced": "04"}[spec_of(name).family]
        assert spec_of(name).windowed is (spec_of(name).family != "tabular")
    assert {"xgboost", "lightgbm", "catboost"} <= set(families["tabular"])
    assert families["sequence"] == ["lstm", "gru", "tcn"]
    assert families["advanced"] == ["patchtst", "itransformer", "tft"]


@pytest.mark.parametrize("name", available_models())
def test_every_dotted_name_leads_somewhere(name):
    spec = spec_of(name)
    assert isinstance(locate(spec.estimator), type)
    assert spec.network is None or isinstance(locate(spec.network), type)


def test_a_misspelt_model_is_suggested():
    with pytest.raises(SettingsError, match="did you mean 'xgboost'"):
        spec_of("xgbost")
    with pytest.raises(SettingsError, match="one of your own is known once register_model has run"):
        spec_of("mine")  # whose letters are nearest to those of "linear"
    with pytest.raises(CheckpointError, match="Not a model's state"):
        load_model({"weights": {}})


@pytest.mark.parametrize("name", available_models())
def test_only_the_model_asked_for_is_loaded(name):
    code = (
        "import sys; from ml_factory.models.registry import available_models, build_model; available_models();"
        "assert not {'torch', 'xgboost', 'lightgbm', 'catboost'} & set(sys.modules);"
        f"build_model({name!r}); print(*(m for m in sys.modules if m.startswith('ml_factory.models.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    own = modules_of(name)
    assert not {module for other in available_models() for module in modules_of(other)} - own & loaded
    assert {module for module in own if module.startswith("ml_factory.models")} <= loaded


def modules_of(name: str) -> set[str]:
    spec = spec_of(name)
    return {dotted.partition(":")[0] for dotted in (spec.network, spec.estimator) if dotted}
