"""Settings of a symbol's current data set that a new `prepare` keeps where no others are given."""

from dataclasses import replace
from pathlib import Path

from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.features.build import FeatureSpec
from ml_factory.settings import DataSpec
from ml_factory.targets.labels import LabelSpec


def previous_data_settings(processed: Path) -> DataSpec:
    """Return labels and `spans` of the symbol's current data set; defaults without one, or after a search."""
    try:
        store = DatasetStore.current(processed)
    except NotPreparedError:
        return DataSpec()
    labels = LabelSpec() if store.facts["settings"].get("searched") else LabelSpec(**store.facts["settings"]["labels"])
    return DataSpec(features=FeatureSpec(spans=store.facts["settings"]["features"].get("spans", False)), labels=labels)


def add_given_market_facts(settings: DataSpec, processed: Path) -> DataSpec:
    """Return the settings with calendar and tick as given before, where none is given now."""
    try:
        store = DatasetStore.current(processed)
    except NotPreparedError:
        return settings
    market = store.facts["market"]
    given = {name for name, how in market["source"].items() if how == "given"}
    kept = {name: market[name] for name in ("calendar", "tick") if name in given and getattr(settings, name) is None}
    return replace(settings, **kept)
