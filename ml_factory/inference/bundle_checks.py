"""Checks of a bundle against the library that loads it: facts, certificate, libraries, features, bars."""

import re
from collections.abc import Iterable, Mapping

import pandas as pd

import ml_factory
from ml_factory.data.parsing import PRICES
from ml_factory.data.quality import OFF_SHARE, ON_SHARE, off_tick_rows
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import BarsError, CheckpointError, MissingPackageError, SettingsError
from ml_factory.features.build import feature_column_names
from ml_factory.features.custom import get_custom_feature
from ml_factory.inference.prediction_spec import PredictionSpec
from ml_factory.inference.trained_model import installed_library_versions
from ml_factory.lazy_module import EXTRAS, missing_package_error
from ml_factory.models.registry import find_model_spec, registered_source_hash
from ml_factory.storage.json_values import fingerprint_json

LARGEST_BUNDLE = 256 * 2**20  # bytes
_NO_LIBRARY = ("linear",)
_NEEDED = {
    **dict.fromkeys(("symbol", "model", "run_id", "data"), str), "off_tick": int | float,
    **dict.fromkeys(("horizon", "lookback"), int),
    **dict.fromkeys(("split_times", "spec", "custom", "networks", "versions", "models", "raw"), dict),
    **dict.fromkeys(("feature_names", "classes"), list),
    **dict.fromkeys(("stack", "certificate"), dict | None),
}  # fmt: skip


def libraries_of_models(names: Iterable[str]) -> list[str]:
    """Return the packages that these models predict with."""
    return sorted({
        "torch" if find_model_spec(name).windowed else name for name in names if name not in _NO_LIBRARY
    })  # fmt: skip


def absent_libraries(names: Iterable[str]) -> list[str]:
    """Return the packages of these models that are not installed here."""
    return [name for name in libraries_of_models(names) if name not in installed_library_versions((name,))]


def custom_feature_modules(spec: PredictionSpec) -> dict[str, dict[str, str]]:
    """Return the user's own features: name -> the module that defines it, and the hash of its source."""
    made = {name: get_custom_feature(name) for name in spec.features.custom}
    return {
        one.name: {"module": one.original.__module__, "hash": one.signature} for one in made.values()
    }  # fmt: skip


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_bundle_description(description: Mapping, where: object) -> None:
    """Raise CheckpointError where a fact that predictions need is absent or of another type."""
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(description.get(name), kind)]
    if wrong:
        raise CheckpointError(
            "A bundle lacks facts, or was written by another version", where=where, got=f"no {', '.join(wrong)}",
            next_step="export it again",
        )  # fmt: skip


def check_bundle_certificate(description: Mapping, where: object) -> None:
    """Raise CheckpointError for a certificate that is changed, of other data, or of a pipeline that looks ahead."""
    stored = description["certificate"]
    if stored is None:
        return
    content = {name: value for name, value in stored.items() if name != "hash"}
    if stored["hash"] != fingerprint_json(content):
        raise CheckpointError("The certificate in this bundle was changed", where=where, next_step="export it again")
    about = [content["subject"], content["symbol"], content["horizon"]]
    wanted = [description["data"], description["symbol"], description["horizon"]]
    if about != wanted:
        raise CheckpointError(
            "The certificate in this bundle is of other data", where=where, got=about, wanted=wanted,
            next_step="export it again",
        )  # fmt: skip
    if not content["passed"]:
        raise CheckpointError(
            "The certificate in this bundle reports a look-ahead", where=where, got=f"{len(content['leaks'])} leaks",
            next_step="correct it, audit and train again",
        )  # fmt: skip


def check_bundle_libraries(description: Mapping, where: object) -> None:
    """Raise SettingsError naming a library that is older here than where the bundle was made, MissingPackageError for
    one that is absent.
    """
    names = libraries_of_models(description["models"])
    made_with = description["versions"]
    here = installed_library_versions(names) | {"ml_factory": ml_factory.__version__}
    for name in ("ml_factory", *names):
        if name not in here:
            if name in EXTRAS:
                raise missing_package_error(name)
            raise MissingPackageError(f"The package {name} is not installed", where=where, next_step=f"install {name}")
        if _release(here[name]) < _release(made_with[name]):
            raise SettingsError(
                f"{name} is too old for this bundle", where=where, got=here[name], wanted=f"{made_with[name]} or newer",
                next_step=f"pip install --upgrade {name}",
            )  # fmt: skip


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_bundle_features(description: Mapping, spec: PredictionSpec, where: object) -> None:
    """Raise SettingsError where the user's own features or networks are others here, or the columns are."""
    for name, one in description["custom"].items():
        _check_custom_feature(name, one, where)
    for name, signature in description["networks"].items():
        if registered_source_hash(name) != signature:
            raise SettingsError(
                f"The network {name} is not the one in this bundle", where=where,
                got=f"source {registered_source_hash(name) or 'unknown'}", wanted=f"source {signature}",
                next_step="register it as it was, before loading",
            )  # fmt: skip
    names = feature_column_names(spec.market, spec.features)
    if names != description["feature_names"]:
        other = [name for name in (*names, *description["feature_names"])
                 if name not in names or name not in description["feature_names"]]  # fmt: skip
        raise SettingsError(
            "The features of this bundle have other columns here", where=where, got=", ".join(other[:5]) or "the order",
            next_step="use the version it was made with",
        )  # fmt: skip


def _check_custom_feature(name: str, stored: Mapping, where: object) -> None:
    step = f"import {stored['module']} before loading the bundle; on the command line: --import MODULE, or its .py file"
    try:
        found = get_custom_feature(name)
    except SettingsError as error:
        raise SettingsError(
            "This bundle reads a feature of your own, which is not defined here", where=where, got=f"no {name}",
            wanted=f"{name} of the module {stored['module']}", next_step=step,
        ) from error  # fmt: skip
    if found.signature != stored["hash"]:
        raise SettingsError(
            f"The feature {name} is not the one in this bundle", where=where, got=f"source {found.signature}",
            wanted=f"source {stored['hash']} of the module {stored['module']}", next_step="define it as it was",
        )  # fmt: skip


def check_bars_on_tick(bars: pd.DataFrame, market: MarketSpec, share_of_training: float) -> None:
    """Raise BarsError for bars whose prices are not multiples of the tick, where those of training were.

    share_of_training : share of the bars of training with prices off the tick.
    """
    if market.tick is None or share_of_training > ON_SHARE:
        return
    share = off_tick_rows([bars[name].to_numpy() for name in PRICES], market.tick).mean()
    if share > OFF_SHARE:
        raise BarsError(
            "These bars are on another tick than those the model was trained on", where=market.symbol,
            got=f"{share:.0%} of the bars off the tick of {market.tick:g}",
            wanted=f"prices that are multiples of {market.tick:g}",
            next_step=f"give the bars of {market.symbol} as they were traded, not adjusted, and in its units",
        )  # fmt: skip
