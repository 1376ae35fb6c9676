"""A certificate is worth something for these bars, this code and these settings, and nothing of any others."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.bar_report import hash_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import NotPreparedError
from ml_factory.leakage import certificate as kept
from ml_factory.leakage.certificate import Certificate, require_certificate, write_certificate
from ml_factory.leakage.tables import Leak

LEAK = Leak("features", "rsi_14", 3, "2024-01-02", 0.5, "2024-01-03", "random", "mirror", "window")
CUTS = tuple((f"2024-01-{day:02}", "random") for day in range(1, 11))


def certificate(*leaks: Leak, form: str = "quick") -> Certificate:
    return Certificate("DEMO", 20, "a" * 64, "b", "c", form, CUTS, ("mirror",), {"features": 5}, leaks)


@pytest.mark.parametrize("column", ["open", "high", "low", "close", "volume", "time"])
def test_changed_bit_of_bars_changes_their_hash(column):
    bars = synthetic_bars(days=2, seed=3)
    other = bars.copy()
    if column == "time":
        other.index = other.index.where(np.arange(len(other)) != 700, other.index[700] + pd.Timedelta(seconds=1))
    else:
        other.iloc[700, other.columns.get_loc(column)] = np.nextafter(other[column].iloc[700], np.inf)
    assert hash_bars(bars.copy()) == hash_bars(bars) != hash_bars(other)


def test_read_certificate_returns_written_certificate(tmp_path):
    made = certificate(LEAK)
    assert kept.read_certificate(write_certificate(tmp_path, made)) == made


def need(tmp_path, **other):
    asked = {"symbol": "DEMO", "horizon": 20, "subject": "a" * 64, "code": "c"} | other
    return require_certificate(tmp_path, asked.pop("symbol"), asked.pop("horizon"), **asked)


def test_require_certificate_accepts_matching_and_rejects_other_subject(tmp_path):
    made = certificate()
    write_certificate(tmp_path, made)
    assert need(tmp_path) == made
    for other in ({"subject": "b" * 64}, {"code": "d"}, {"horizon": 5}):
        with pytest.raises(NotPreparedError, match=r"prepare --symbol DEMO .*python -m ml_factory audit --symbol DEMO"):
            need(tmp_path, **other)


@pytest.mark.parametrize("harm", ["torn", "edited", "emptied", "other format", "a list"])
def test_read_certificate_damaged_file_returns_none(harm, tmp_path):
    path = write_certificate(tmp_path, certificate(LEAK))
    stored = json.loads(path.read_text())
    harmed = {
        "torn": path.read_text()[:-40],
        "edited": json.dumps(stored | {"leaks": [], "passed": True}),
        "emptied": "",
        "other format": json.dumps(stored | {"format": 99}),
        "a list": "[1, 2]",
    }
    path.write_text(harmed[harm])
    assert kept.read_certificate(path) is None
    with pytest.raises(NotPreparedError, match="no certificate"):
        need(tmp_path)


def test_write_certificate_quick_form_keeps_full_form_unless_leak(tmp_path):
    path = write_certificate(tmp_path, certificate(form="full"))
    write_certificate(tmp_path, certificate())
    assert kept.read_certificate(path).form == "full"
    write_certificate(tmp_path, certificate(LEAK))
    assert not kept.read_certificate(path).passed


@pytest.mark.parametrize(("leaks", "more"), [(1, ""), (2, " and 1 more"), (3, " and 2 more")])
def test_require_certificate_counts_leaks_that_it_does_not_name(tmp_path, leaks, more):
    write_certificate(tmp_path, certificate(*[replace(LEAK, column=f"rsi_{n}") for n in range(leaks)]))
    with pytest.raises(NotPreparedError) as caught:
        need(tmp_path)
    assert "looks ahead" in str(caught.value) and "rsi_0 changes in 3 rows from" in str(caught.value)
    assert (f"{more}." in str(caught.value)) and ("more" in str(caught.value)) == bool(more)
