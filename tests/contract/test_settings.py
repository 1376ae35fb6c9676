"""Every field of every settings class refuses a value of another kind, in one line that names the field."""

from dataclasses import fields
from functools import partial

import pytest

from ml_factory.errors import SettingsError
from ml_factory.models.registry import available_models, build_model
from tests.contract import doors

MAKERS = {name: (partial(build_model, name), type(build_model(name).settings)) for name in available_models()}
MAKERS |= {kind.__name__: (kind, kind) for kind in doors.SETTINGS}
FIELDS = [(name, item.name) for name, (_, kind) in MAKERS.items() for item in fields(kind)]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_value_of_another_kind_is_refused_with_the_name_of_its_field(name, field):
    make, kind = MAKERS[name]
    declared = str(next(item.type for item in fields(kind) if item.name == field))
    values = [{"a": 1}, object()] if "str" in declared else [{"a": 1}, object(), "strange", float("nan")]
    for value in values:
        with pytest.raises(SettingsError) as refused:
            make(**{field: value})
        assert field in str(refused.value) and "\n" not in str(refused.value)


OUT_OF_RANGE = {
    "lstm": [{"hidden": 0}, {"layers": 1.5}, {"dropout": 1.0}, {"lookback": 1}, {"epochs": 0}, {"batch": True},
             {"lr": float("inf")}, {"clip": 0}, {"warmup": 1.0}, {"weight_decay": -0.1}, {"device": "gpu"},
             {"offset_bars": 1.5}, {"class_weight": "equal"}],
    "tcn": [{"width": 0}, {"kernel": 0}, {"levels": -1}],
    "patchtst": [{"stride": 0}, {"heads": 3}],
    "itransformer": [{"read": 0}, {"heads": 3}],
    "tft": [{"width": 0}, {"heads": 3}, {"layers": 0}, {"dropout": 1.0}],
    "xgboost": [{"rounds": 0}, {"depth": 2.5}, {"row_sample": 0.0}, {"l2": -1.0}, {"min_leaf": None},
                {"device": "tpu"}],
    "lightgbm": [{"learning_rate": 0.0}, {"column_sample": 1.1}, {"device": "cuda"}],
    "linear": [{"l2": -1.0}, {"clip": -1.0}, {"class_weight": "even"}],
    "SplitSpec": [{"train": 0.0}, {"train": 0.9, "validation": 0.1}, {"embargo_bars": -1}, {"train": True}],
    "LabelSpec": [{"horizon": 0}, {"horizon": True}, {"horizon": 2.0}, {"k_up": 0.0}, {"k_down": float("inf")},
                  {"sigma_span": 1}, {"cost_ticks": -1.0}, {"session_end": "cut"}],
    "RawBarSpec": [{"stamp": "middle"}, {"minutes": 7}, {"minutes": 0}, {"zone": "Mars"}, {"decimal": ";"}],
    "FeatureSpec": [{"base_minutes": 0}, {"frames": (60, 15)}, {"frames": (5, 15)}, {"families": ("momentun",)},
                    {"families": ()}, {"families": ("volume", "volume")}],
    "RollSpec": [{"by": "open_interest"}, {"days_before": -1}, {"forced": (("ESM4", "2024-03-06 12:00"),)}],
    "SyntheticSpec": [{"kind": "nul"}, {"calendar": "cmes"}, {"days": 0}, {"missing": 0.9}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "given"), [(name, one) for name, some in OUT_OF_RANGE.items() for one in some])
def test_value_out_of_range_is_refused_with_the_name_of_its_field(name, given):
    with pytest.raises(SettingsError, match=next(iter(given))):
        MAKERS[name][0](**given)


@pytest.mark.parametrize("name", MAKERS)
def test_unknown_setting_is_refused(name):
    with pytest.raises((SettingsError, TypeError), match="no_such_setting"):
        MAKERS[name][0](no_such_setting=1)


@pytest.mark.parametrize("name", MAKERS)
def test_default_settings_are_accepted(name):
    MAKERS[name][0]()
