"""Run ids that change with code and with the limits of a quick run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ml_factory import code_fingerprint, settings
from ml_factory.settings import QuickLimits
from tests.contract.test_run_settings import SPEC


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Path:
    """The library's sources, copied; run ids are computed from the copy."""
    shutil.copytree(code_fingerprint.PACKAGE, tmp_path / "ml_factory", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_fingerprint, "PACKAGE", tmp_path / "ml_factory")
    return tmp_path / "ml_factory"


def test_run_id_changes_with_code_that_fits_and_certificate_with_all_that_computes(copied, spec=SPEC):
    for source, fits, certifies in (
        ("models/tabular.py", True, True), ("training/loop.py", True, True), ("workflows/folds.py", True, True),
        ("inference/predict.py", True, True),
        ("inference/guard.py", False, True), ("seeding.py", True, True), ("leakage/proof.py", False, True),
        ("data/resample.py", False, True), ("evaluation/plots.py", False, False), ("notebook.py", False, False),
        ("workflows/report.py", False, False),
    ):  # fmt: skip
        run_id, code, text = spec.run_id, settings.certified_code_hash(), (copied / source).read_text()
        (copied / source).write_text(f"{text}CHANGED = 1\n")
        assert (spec.run_id != run_id, settings.certified_code_hash() != code) == (fits, certifies), source
        (copied / source).write_text(text)
        assert spec.run_id == run_id


def test_names_of_packages_in_identities_exist():
    for name in (*settings.DATA_PACKAGES, *settings.FIT_PACKAGES, *settings.COMPUTES_NOTHING):
        assert (code_fingerprint.PACKAGE / name).exists(), name


def test_run_spec_run_id_of_quick_run_changes_with_limits(monkeypatch):
    quick = replace(SPEC, quick=True)
    full_id, quick_id = SPEC.run_id, quick.run_id
    monkeypatch.setattr(settings, "QuickLimits", lambda: replace(QuickLimits(), sequence_rows=17))
    assert quick.run_id != quick_id and SPEC.run_id == full_id
