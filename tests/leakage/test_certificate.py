"""A certificate is worth something for these bars, this code and these settings, and nothing of any others."""

import json

import pytest

from ml_factory.errors import NotPreparedError
from ml_factory.leakage import certificate as kept
from ml_factory.leakage.certificate import Certificate, require_certificate, write_certificate
from ml_factory.leakage.tables import Leak

LEAK = Leak("features", "rsi_14", 3, "2024-01-02", "2024-01-03", "random", "mirror", "window")
CUTS = tuple((f"2024-01-{day:02}", "random") for day in range(1, 11))


def certificate(*leaks: Leak, form: str = "quick") -> Certificate:
    return Certificate("DEMO", 20, "a" * 64, "b", "c", form, CUTS, ("mirror",), {"features": 5}, leaks)


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
