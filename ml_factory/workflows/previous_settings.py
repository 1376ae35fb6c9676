"""Settings of a symbol's current data set that a new `prepare` keeps where no others are given."""

from dataclasses import replace
from pathlib import Path

from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.features.build import FeatureSpec
from ml_factory.settings import DataSpec
from ml_factory.targets.labels import LabelSpec


def settings_after_previous(given: DataSpec | None, processed: Path) -> DataSpec:
    """Return the given settings, or without any the labels (but for searched ones) and `spans` of the current data set;
    with calendar and tick as given before, where none is given now.
    """
    try:
        facts = DatasetStore.current(processed).facts
    except NotPreparedError:
        return given or DataSpec()
    before, market = facts["settings"], facts["market"]
    if given is None:
        labels = LabelSpec() if before.get("searched") else LabelSpec(**before["labels"])
        given = DataSpec(features=FeatureSpec(spans=before["features"].get("spans", False)), labels=labels)
    kept = {name for name in ("calendar", "tick") if market["source"].get(name) == "given"}
    return replace(given, **{name: market[name] for name in kept if getattr(given, name) is None})
