import subprocess
import sys

import pytest

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.models.registry import available_models, load_model, locate, spec_of


def test_names_families_and_notebooks():
    assert available_models() == ["xgboost", "lightgbm", "catboost", "lstm", "patchtst"]
    assert [spec_of(name).family for name in available_models()] == ["tabular"] * 3 + ["sequence", "advanced"]
    assert [spec_of(name).notebook[:2] for name in available_models()] == ["02", "02", "02", "03", "04"]
    assert [spec_of(name).windowed for name in available_models()] == [False, False, False, True, True]


@pytest.mark.parametrize("name", available_models())
def test_every_dotted_name_leads_somewhere(name):
    spec = spec_of(name)
    assert isinstance(locate(spec.estimator), type)
    assert spec.network is None or isinstance(locate(spec.network), type)


def test_a_misspelt_model_is_suggested():
    with pytest.raises(SettingsError, match="did you mean 'xgboost'"):
        spec_of("xgbost")
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
    own = {spec_of(name).network, spec_of(name).estimator} - {None}
    others = {dotted for other in available_models() for dotted in (spec_of(other).network, spec_of(other).estimator)}
    loaded = set(done.stdout.split())
    assert not {dotted.partition(":")[0] for dotted in others - own - {None}} & loaded
    assert {dotted.partition(":")[0] for dotted in own if dotted.startswith("ml_factory.models")} <= loaded
