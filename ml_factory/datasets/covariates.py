"""Known-future covariates (the exchange calendar) and static covariates of a window.

N rows, S steps ahead, K known variables, V static ones.

Of the future only the calendar is known: the exchange publishes its hours, weekends, holidays and early closes. So a
known variable is computed from a row's own `known_at` and the calendar; no later row of the data is used, and whether a
bar will occur at all is not known either.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MarketSpec, assign_sessions
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.features.build import FeatureSpec
from ml_factory.features.calendar import BASE, WEEK_DAYS

KNOWN = BASE[:5]  # the family's columns that depend on the clock alone
STATIC = ("symbol", "week_sine", "week_cosine")
_REFUSED = {"known": "Only the calendar is known ahead", "static": "This is not constant in a window"}
_MINUTE_NS = 60_000_000_000


def resolve_covariate_settings(settings: Mapping, horizon: int, features: FeatureSpec) -> dict:
    """Return the settings with `known` and `static` as lists of names, and the number of steps that are known ahead.

    known=True selects the whole clock; the steps ahead default to the horizon.

    Raises
    ------
    SettingsError : a variable that is not known ahead, or changes in a window; windows and labels that span sessions
    """
    settings = dict(settings)
    # A window that spans nights contains several days of the week.
    for name, available in (("known", KNOWN), ("static", STATIC[:1] if features.spans else STATIC)):
        if names := _requested_names(name, settings.pop(name, None), available):
            settings[name] = names
    if "known" in settings:
        if features.spans:
            raise SettingsError(
                "Which bars of the next session will come is not known ahead", where="known",
                got="windows and labels that span sessions", wanted="windows and labels inside one",
                next_step="leave known= out, or prepare without --span",
            )  # fmt: skip
        settings.setdefault("ahead", horizon)
    return settings


def _requested_names(setting: str, given: object, available: Sequence[str]) -> list[str]:
    """Return the names in a setting; [] for False and empty values. Raises SettingsError."""
    if given is True:
        return list(available)
    if given is None or given is False:
        return []
    if not isinstance(given, str | list | tuple):
        raise SettingsError(
            "Not a selection of inputs", where=setting, got=repr(given),
            wanted="true, or some of " + ", ".join(available),
            next_step=f"{setting}=true for all of them, or leave it out",
        )  # fmt: skip
    names = [given] if isinstance(given, str) and given else list(given)
    for name in names:
        if name not in available:
            raise SettingsError(
                _REFUSED[setting], where=setting, got=repr(name), wanted=", ".join(available),
                next_step=did_you_mean(str(name), available),
            )  # fmt: skip
    return names


def compute_covariates(model: object, known_at: pd.DatetimeIndex, settings: Mapping) -> dict[str, np.ndarray]:
    """Compute the covariates that `model.network_spec` names, for rows known at these moments.

    Parameters
    ----------
    model : a model with `network_spec` and `covariates`
    known_at : N moments
    settings : of the data and the market, as stored. A symbol is 1: a data set has one

    Returns
    -------
    argument -> float32 (N, S, K) or (N, V)
    """
    spec, wanted = getattr(model, "network_spec", None), getattr(model, "covariates", {})
    if not wanted:
        return {}
    calendar = MarketSpec.from_dict(settings["market"]).calendar
    arrays = {}
    if "known_BSK" in wanted:
        minutes = FeatureSpec(**settings["data"]["features"]).base_minutes
        clock = known_future_covariates(known_at, calendar, np.arange(1, spec.ahead + 1) * minutes)
        arrays["known_BSK"] = np.stack([clock[name] for name in spec.known], axis=2)
    if "static_BV" in wanted:
        now = known_future_covariates(known_at, calendar, np.zeros(1, np.int64)) | {
            "symbol": np.ones((len(known_at), 1), np.float32)
        }
        arrays["static_BV"] = np.concatenate([now[name] for name in spec.static], axis=1)
    return arrays


def known_future_covariates(known_at: pd.DatetimeIndex, calendar: str, minutes: np.ndarray) -> dict[str, np.ndarray]:
    """Return the clock's columns so many minutes after each row: name -> float32 (N, len(minutes)).

    The clock stops at the session's end, where labels end too; `resolve_covariate_settings` refuses labels that span
    sessions.
    """
    now = known_at.as_unit("ns").asi8
    session = assign_sessions(now - 1, calendar)  # of the bar that ends now
    opens, closes = session.open_ns[:, None], session.close_ns[:, None]
    moments = np.minimum(now[:, None] + minutes * _MINUTE_NS, np.maximum(closes, now[:, None]))
    progress = (moments - opens) / (closes - opens)
    # Day 0 was a Thursday; Monday is 0.
    week = np.broadcast_to((2.0 * np.pi * ((session.id + 3) % WEEK_DAYS) / WEEK_DAYS)[:, None], progress.shape)
    hands = (progress - 0.5, np.sin(2 * np.pi * progress), np.cos(2 * np.pi * progress), np.sin(week), np.cos(week))
    return {name: np.ascontiguousarray(hand, np.float32) for name, hand in zip(KNOWN, hands, strict=True)}
