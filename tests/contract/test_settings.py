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


@pytest.mark.parametrize("name", MAKERS)
def test_unknown_setting_is_refused(name):
    with pytest.raises((SettingsError, TypeError), match="no_such_setting"):
        MAKERS[name][0](no_such_setting=1)


@pytest.mark.parametrize("name", MAKERS)
def test_default_settings_are_accepted(name):
    MAKERS[name][0]()
