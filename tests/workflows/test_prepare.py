"""`prepare`: what it keeps, of minutes and of longer bars, and views of what it made."""
# ruff: noqa: F811 - fixtures of the contract

import select
import subprocess
import sys
from pathlib import Path

import pytest

from ml_factory import pipeline
from ml_factory.datasets.store import DatasetStore
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import prepare, prove
from ml_factory.workflows.prepared_dataset import load_dataset
from tests.contract.test_prepare import BARS, place, raw  # noqa: F401 - fixtures
from tests.small_data import SMALL_DATA

pytestmark = pytest.mark.slow  # so that it begins first


def certificates(place: Workspace) -> dict[str, bytes]:
    """Everything in the folder of the current data set's certificates."""
    folder = DatasetStore.current(place.processed("MES")).fingerprint[:12]
    return {path.name: path.read_bytes() for path in (place.processed("MES") / "certificates" / folder).iterdir()}


def test_prepare_killed_between_two_certificates_writes_the_same_again(place, tmp_path, monkeypatch):
    elsewhere = Workspace(tmp_path / "there")
    for one in (place, elsewhere):
        raw(one, BARS[:10_000])
    pipeline.prepare(elsewhere, "MES", (5, 20), settings=SMALL_DATA)

    class Died(BaseException):
        pass

    def die_after_one(processed, certificate, real=prove.write_certificate):
        real(processed, certificate)
        raise Died

    with monkeypatch.context() as patch, pytest.raises(Died):
        patch.setattr(prove, "write_certificate", die_after_one)
        pipeline.prepare(place, "MES", (5, 20), settings=SMALL_DATA)
    pipeline.prepare(place, "MES", (5, 20), settings=SMALL_DATA)
    assert certificates(place) == certificates(elsewhere)
    assert sorted(certificates(place)) == ["h20.json", "h5.json"]


SECOND = """
import sys
from ml_factory import pipeline
from ml_factory.workflows import prepare
from tests.small_data import SMALL_DATA

def import_and_say_so(*given, real=prepare.import_bars, **named):
    imported = real(*given, **named)
    print("imported", flush=True)
    return imported

prepare.import_bars = import_and_say_so
print("ready", flush=True)
sys.stdin.readline()
pipeline.prepare(sys.argv[1], "MES", (5,), data=sys.argv[2], settings=SMALL_DATA)
"""


def test_second_prepare_of_a_symbol_imports_its_bars_only_when_the_first_has_ended(place, tmp_path, monkeypatch):
    """Else the features of one file would stand under the fingerprint of the other."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    for name, count in (("first", 10_000), ("second", 9_000)):
        BARS[:count].reset_index().to_parquet(tmp_path / f"{name}.parquet")
    command = [sys.executable, "-c", SECOND, place.root, tmp_path / "second.parquet"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout.readline() == "ready\n"

        def import_then_wait(*given, real=prepare.import_bars, **named):
            imported = real(*given, **named)
            second.stdin.write("\n")
            second.stdin.flush()
            select.select([second.stdout], [], [], 2.0)  # until the second has imported too, if it may
            return imported

        monkeypatch.setattr(prepare, "import_bars", import_then_wait)
        first = pipeline.prepare(place, "MES", (5,), data=tmp_path / "first.parquet", settings=SMALL_DATA)
        assert second.wait(timeout=120) == 0
    stored = DatasetStore.current(place.processed("MES"))
    assert stored.facts["raw"]["rows"] == 9_000 and stored.fingerprint != first.fingerprint


@pytest.mark.parametrize("step", ["import_bars", "build_features", "build", "_certify"])
def test_interrupted_prepare_of_another_file_keeps_what_was_prepared_before(step, place, tmp_path, monkeypatch):
    for name, count in (("before", 9_000), ("now", 9_500), ("other", 10_000)):
        BARS[:count].reset_index().to_parquet(tmp_path / f"{name}.parquet")
        if name != "other":
            pipeline.prepare(place, "MES", (5,), data=tmp_path / f"{name}.parquet", settings=SMALL_DATA)
    kept = {path.name: path.read_bytes() for path in place.raw.iterdir()}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, step, interrupt)
        pipeline.prepare(place, "MES", (5,), data=tmp_path / "other.parquet", settings=SMALL_DATA)
    assert {path.name: path.read_bytes() for path in place.raw.iterdir()} == kept
    assert len(load_dataset(place, "MES", 5).features) == DatasetStore.current(place.processed("MES")).rows
