"""Packages that run ids are computed from, and the limits of a quick run."""

from dataclasses import replace

from ml_factory import code_fingerprint, settings
from ml_factory.settings import QuickLimits
from tests.contract.test_run_settings import SPEC


def test_names_of_packages_in_identities_exist():
    for name in (*settings.DATA_PACKAGES, *settings.FIT_PACKAGES, *settings.COMPUTES_NOTHING):
        assert (code_fingerprint.PACKAGE / name).exists(), name


def test_run_spec_run_id_of_quick_run_changes_with_limits(monkeypatch):
    quick = replace(SPEC, quick=True)
    full_id, quick_id = SPEC.run_id, quick.run_id
    monkeypatch.setattr(settings, "QuickLimits", lambda: replace(QuickLimits(), sequence_rows=17))
    assert quick.run_id != quick_id and SPEC.run_id == full_id
