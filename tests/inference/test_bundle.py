"""A bundle predicts raw bars as the pipeline does, and is refused where anything in it or around it does not fit."""

from types import SimpleNamespace

import pytest

from ml_factory import Bundle, pipeline
from ml_factory.errors import FactoryError, MissingPackageError, SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.inference import bundle as bundle_file_module
from ml_factory.settings import DataSpec
from ml_factory.workflows import export
from tests.inference.conftest import H


def test_bundle_load_with_older_or_absent_library_raises(bundle_file, monkeypatch):
    installed = bundle_file_module.installed_library_versions
    boosted, other, linear = (bundle_file(name) for name in ("xgboost", "lightgbm", "linear"))  # by today's versions

    def old(names):
        return installed(names) | {"xgboost": "2.9.1"}

    with monkeypatch.context() as patch:
        patch.setattr(bundle_file_module, "installed_library_versions", old)
        with pytest.raises(SettingsError, match=r"xgboost is too old.*got 2.9.1, wanted 3\..*pip install --upgrade"):
            Bundle.load(boosted)
        Bundle.load(other)  # which does not need it
        patch.setattr(bundle_file_module, "installed_library_versions", lambda names: {"python": "3.11"})
        with pytest.raises(MissingPackageError, match=r"lightgbm is not installed.*ml_factory\[train\]"):
            Bundle.load(other)
    with monkeypatch.context() as patch:
        patch.setattr(bundle_file_module.ml_factory, "__version__", "0.0.9")
        with pytest.raises(SettingsError, match=r"ml_factory is too old"):
            Bundle.load(linear)


def test_export_of_model_whose_data_is_another_or_looks_ahead_raises_and_leaves_nothing(
    prepared, tmp_path, monkeypatch
):
    pipeline.train(prepared, "DEMO", H, "linear", mirror="off", model_settings={"rounds": 5})
    failed = SimpleNamespace(passed=False, describe=lambda: "FAILED: 1 leaks")
    with monkeypatch.context() as patch, pytest.raises(FactoryError, match=r"reports a look-ahead.*FAILED"):
        patch.setattr(export, "stored_certificate", lambda *_: failed)
        pipeline.export(prepared, "DEMO", H, "linear", formats=("bundle",), out=tmp_path / "out")
    pipeline.prepare(
        prepared, "DEMO", (H,), settings=DataSpec(features=FeatureSpec(frames=(60,), families=("calendar",)))
    )
    with pytest.raises(FactoryError, match=r"prepared data is not the one this model was trained on"):
        pipeline.export(prepared, "DEMO", H, "linear", formats=("bundle",), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
