"""A certificate is worth something for these bars, this code and these settings, and nothing of any others."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data import prefix_hash
from ml_factory.data.prefix_hash import PrefixHasher
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import NotPreparedError
from ml_factory.leakage import certificate as kept
from ml_factory.leakage.certificate import (
    NO_COVERAGE,
    certificate_coverage,
    issue_certificate,
    require_certificate,
    write_certificate,
)
from ml_factory.leakage.cut_points import CutPoint
from ml_factory.leakage.proof_result import Proof
from ml_factory.leakage.timed_tables import Leak

BOUND = {"symbol": "DEMO", "horizon": 20, "subject": "a" * 64, "code": "c", "settings": "s"}
LEAK = Leak("features", "rsi_14", 3, "2024-01-02", 0.5, "2024-01-03", "random", "mirror", "window")


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    return synthetic_bars(days=6, seed=3)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(prefix_hash, "BLOCK_ROWS", 1_000)


def proof(*leaks: Leak, form: str = "quick", cuts: int = 10) -> Proof:
    made = tuple(CutPoint(k + 1, k, k, "random") for k in range(cuts))
    return Proof(form, made, ("mirror",), {"features": 5}, leaks, 30, 500, 1.5)


def certificate(bars, *leaks, form="quick", before=NO_COVERAGE, **other):
    return issue_certificate(proof(*leaks), PrefixHasher(bars), form=form, before=before, **BOUND | other)


def test_prefix_hasher_hash_of_prefix_equals_hash_of_truncated_bars(bars):
    ends = [1, 999, 1_000, 1_001, 4_321, len(bars)]
    whole = PrefixHasher(bars)
    for end in (*ends, *ends[::-1]):  # in any order, and once more
        assert whole.hash_prefix(end) == PrefixHasher(bars.iloc[:end]).total_hash
    assert len({whole.hash_prefix(end) for end in ends}) == len(ends)
    assert whole.block_hashes(2_500) == [whole.hash_prefix(1_000), whole.hash_prefix(2_000)]


@pytest.mark.parametrize("column", ["open", "high", "low", "close", "volume", "time"])
def test_prefix_hasher_changed_bit_in_prefix_changes_hash(column, bars):
    other = bars.copy()
    if column == "time":
        other.index = other.index.where(np.arange(len(other)) != 700, other.index[700] + pd.Timedelta(seconds=1))
    else:
        other.iloc[700, other.columns.get_loc(column)] = np.nextafter(other[column].iloc[700], np.inf)
    before, after = ([PrefixHasher(one).hash_prefix(end) for end in (700, 701, 5_000)] for one in (bars, other))
    assert before[0] == after[0] and before[1] != after[1] and before[2] != after[2]


def test_coverage_of_appended_bars_keeps_proved_rows(bars):
    first = certificate(bars.iloc[:5_000], form="full")
    found = certificate_coverage(first, PrefixHasher(bars))
    assert (found.rows, found.history) == (5_000, 500)
    whole = certificate(bars, before=found)
    assert [(one.rows, one.form) for one in whole.stretches] == [(5_000, "full"), (len(bars), "quick")]
    assert whole.form == "quick" and "full to" in whole.describe() and "quick to" in whole.describe()
    assert certificate_coverage(whole, PrefixHasher(bars)).rows == len(bars)
    assert (
        certificate_coverage(whole, PrefixHasher(bars), "full").rows == 5_000
    )  # the full form takes only what was fully proved


def test_coverage_of_revised_bars_keeps_blocks_before_revision(bars):
    stood = certificate(bars)
    revised = bars.copy()
    revised.iloc[4_500, 3] += 1.0
    assert certificate_coverage(stood, PrefixHasher(revised)).rows == 4_000
    revised.iloc[10, 3] += 1.0
    assert certificate_coverage(stood, PrefixHasher(revised)) == NO_COVERAGE
    assert certificate_coverage(stood, PrefixHasher(bars.iloc[:3_500])).rows == 3_000


def test_coverage_of_certificate_with_leak_is_none(bars):
    assert certificate_coverage(certificate(bars, LEAK), PrefixHasher(bars)) == NO_COVERAGE


def test_read_certificate_returns_written_certificate(bars, tmp_path):
    made = certificate(bars, LEAK)
    assert kept.read_certificate(write_certificate(tmp_path, made)) == made


def need(tmp_path, **other):
    asked = {"symbol": "DEMO", "horizon": 20, "subject": BOUND["subject"], "code": "c"} | other
    return require_certificate(tmp_path, asked.pop("symbol"), asked.pop("horizon"), **asked)


def test_require_certificate_accepts_matching_and_rejects_other_subject(bars, tmp_path):
    made = certificate(bars)
    write_certificate(tmp_path, made)
    assert need(tmp_path) == made
    for other in ({"subject": "b" * 64}, {"code": "d"}, {"horizon": 5}):
        with pytest.raises(NotPreparedError, match=r"prepare --symbol DEMO .*python -m ml_factory audit --symbol DEMO"):
            need(tmp_path, **other)


def test_require_certificate_with_leak_error_names_column_rows_and_cut(bars, tmp_path):
    write_certificate(tmp_path, certificate(bars, LEAK))
    with pytest.raises(NotPreparedError, match=r"looks ahead.*rsi_14 changes in 3 rows.*2024-01-03.*mirror.*audit"):
        need(tmp_path)


@pytest.mark.parametrize("harm", ["torn", "edited", "emptied", "other format", "a list"])
def test_read_certificate_damaged_file_returns_none(harm, bars, tmp_path):
    path = write_certificate(tmp_path, certificate(bars, LEAK))
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


def test_write_certificate_quick_form_keeps_full_form_unless_leak(bars, tmp_path):
    path = write_certificate(tmp_path, certificate(bars, form="full"))
    write_certificate(tmp_path, certificate(bars))
    assert kept.read_certificate(path).form == "full"
    write_certificate(tmp_path, certificate(bars, LEAK))
    assert not kept.read_certificate(path).passed


def test_best_coverage_returns_longest_matching_certificate(bars, tmp_path):
    write_certificate(tmp_path, certificate(bars.iloc[:3_000]))
    write_certificate(tmp_path, certificate(bars.iloc[:6_000], subject="b" * 64))
    write_certificate(tmp_path, certificate(bars, subject="d" * 64, code="other"))
    asked = {"code": "c", "settings": "s", "form": "quick"}
    assert kept.best_certificate_coverage(tmp_path, PrefixHasher(bars), 20, **asked).rows == 6_000
    assert kept.best_certificate_coverage(tmp_path, PrefixHasher(bars), 20, **asked | {"settings": "t"}) == NO_COVERAGE
    assert kept.best_certificate_coverage(tmp_path, PrefixHasher(bars), 5, **asked) == NO_COVERAGE


def test_certificate_describe_names_form_and_first_leak(bars):
    assert certificate(bars).describe() == "quick, 10 cuts"
    assert certificate(bars, LEAK).describe() == "FAILED: 1 leaks, the first in features, rsi_14"
    assert replace(certificate(bars), leaks=()).passed


@pytest.mark.parametrize(("leaks", "more"), [(1, ""), (2, " and 1 more"), (3, " and 2 more")])
def test_require_certificate_counts_leaks_that_it_does_not_name(bars, tmp_path, leaks, more):
    write_certificate(tmp_path, certificate(bars, *[replace(LEAK, column=f"rsi_{n}") for n in range(leaks)]))
    with pytest.raises(NotPreparedError) as caught:
        need(tmp_path)
    assert (f"{more}." in str(caught.value)) and ("more" in str(caught.value)) == bool(more)
