"""What `prepare` keeps of what a user said, and of what it made before."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.io import import_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import BarsError, WorkspaceError
from ml_factory.features import custom
from ml_factory.features.build import FeatureSpec
from ml_factory.features.custom import feature
from ml_factory.settings import DataSpec
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import build, prepare, prove
from ml_factory.workflows.prepared_dataset import fit_dataset_preprocessing, load_dataset
from tests.small_data import FEW_COLUMNS, SMALL_DATA


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("prepared"))
    import_bars(synthetic_bars(days=12, seed=4).reset_index(), made, "ODD")
    return made


def test_prepare_keeps_given_calendar_and_tick_until_changed(workspace):
    with pytest.raises(BarsError, match="--calendar, --tick"):  # all 12 sessions decided what was inferred
        pipeline.prepare(workspace, "ODD", (10,), settings=SMALL_DATA)
    given = pipeline.prepare(workspace, "ODD", (10,), settings=DataSpec(features=FEW_COLUMNS, calendar="24h", tick=0.5))
    again = pipeline.prepare(workspace, "ODD", (10,), settings=SMALL_DATA)
    assert (again.fingerprint, again.reused) == (given.fingerprint, True)
    assert (again.market["calendar"], again.market["tick"]) == ("24h", 0.5)
    other = pipeline.prepare(workspace, "ODD", (10,), settings=DataSpec(features=FEW_COLUMNS, calendar="cme"))
    assert (other.market["calendar"], other.market["tick"]) == ("cme", 0.5)


def test_prepare_labels_and_windows_span_sessions_only_with_span(workspace, call):
    """`--span` is part of the data's identity, asked again without settings, and proved like the rest."""

    def leaving() -> tuple[int, int, str]:
        """Labels that end in another session, rows with a window of 64, and what the data set is."""
        data = load_dataset(workspace, "ODD", 20)
        rows = DatasetStore.current(workspace.processed("ODD")).load_row_facts()
        out = data.labels["label_end"] - data.labels.index > pd.Timedelta(hours=2)  # none lasts longer inside one
        assert rows["segment"].is_monotonic_increasing
        return int(out.sum()), int(data.full_window_mask(64).sum()), data.fingerprint

    words = ("prepare", "--workspace", workspace.root, "--symbol", "ODD", "--horizon", 20, "--json")
    inside = leaving() if not call(*words)[0] else None
    code, out, err = call(*words, "--span")
    across, reported = leaving(), json.loads(out)
    assert code == 0 and reported["proof"] == "quick, 10 cuts", err
    assert inside[0] == 0 and inside[1] < across[1] - 300 and across[0] > 50
    assert across[2] == reported["fingerprint"] != inside[2]
    again = pipeline.prepare(workspace, "ODD", (20,))
    assert (again.fingerprint, again.reused) == (across[2], True)
    settings = {"epochs": 1, "lookback": 64, "hidden": 4}
    reported = pipeline.train(workspace, "ODD", 20, "lstm", model_settings=settings, mirror="off")
    assert np.isfinite(reported.metrics["log_loss"]).all()


# ---- bars that grew ------------------------------------------------------------------------------------------------

BARS = synthetic_bars(days=12, seed=4, start="2024-02-28")  # clocks change in the weekend after 8 March


def raw(workspace: Workspace, bars: pd.DataFrame) -> None:
    bars.reset_index().to_parquet(workspace.raw_bars("MES"), index=False)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Workspace(tmp_path / "here")


def test_prepare_added_horizon_reuses_stored_features(place, monkeypatch):
    raw(place, BARS)
    pipeline.prepare(place, "MES", (5,), settings=SMALL_DATA)
    monkeypatch.setattr(build, "build_features", None)
    assert pipeline.prepare(place, "MES", (7,), settings=SMALL_DATA).horizons == [7]
    store, whole = DatasetStore.current(place.processed("MES")), load_dataset(place, "MES", 7)
    assert store.horizons == (5, 7)
    assert whole.scaler.to_dict() == type(whole.scaler).fit(whole.x_NF, whole.row[whole.splits["train"]]).to_dict()


def test_prepare_with_preprocess_steps_fits_trains_and_predicts_with_steps(place):
    raw(place, BARS[:8000])
    steps = ("variance", {"step": "clusters", "most": 0.8}, "standard")
    pipeline.prepare(place, "MES", (5,), settings=DataSpec(features=FEW_COLUMNS, preprocess=steps))
    data = load_dataset(place, "MES", 5)
    assert [step.kind for step in data.scaler.steps] == ["variance", "clusters", "standard"]
    assert fit_dataset_preprocessing(data, data.splits["train"]).to_dict() == data.scaler.to_dict()
    trained = pipeline.train(place, "MES", 5, "lightgbm", model_settings={"rounds": 5}, mirror="off")
    printed = pipeline.load_predictions(place, "MES", 5, "lightgbm")
    new = pipeline.predict(place, "MES", 5, "lightgbm", all_rows=True).frame
    columns = ["p_short", "p_neutral", "p_long"]
    np.testing.assert_allclose(new.loc[printed.index, columns], printed[columns], atol=1e-12)
    assert trained.report_path.is_file()


@pytest.mark.soak
def test_prepare_by_two_concurrent_processes_stores_both_horizons(place, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    raw(place, BARS)
    code = (
        "import sys; from ml_factory import pipeline; print(pipeline.prepare(sys.argv[1], 'MES', (int(sys.argv[2]),)))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, place.root, horizon], stdout=subprocess.PIPE)
        for horizon in ("5", "9")
    ]
    for one in started:
        one.communicate(timeout=120)
        assert one.returncode == 0
    store = DatasetStore.current(place.processed("MES"))
    assert store.horizons == (5, 9) and store.verify() == []


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


def test_prepare_that_finds_a_leak_proves_once_and_names_it_once(tmp_path, monkeypatch, caplog):
    def peeks(bars):
        move = np.diff(np.log(bars.close), prepend=np.log(bars.close[0]))
        day, minute = np.divmod(np.asarray(bars.known_at) // 60_000_000_000, 1440)
        where = (day > 19_000) & ((day + 3) % 7 == 2) & (minute // 60 == 9)  # Wednesdays of this market, 9 to 10
        return np.where(where, np.append(move[1:], 0.0), move)

    monkeypatch.setattr(custom, "_FEATURES", {})
    feature(peeks, memory=24)
    place = Workspace(tmp_path)
    raw(place, BARS[:9000])
    spec = FeatureSpec(families=("momentum",), frames=(15,), custom=("peeks",))
    pipeline.prepare(place, "MES", (5,), settings=DataSpec(features=spec))
    assert len([line for line in caplog.messages if "peeks changes in" in line]) == 1, caplog.text


def test_prepare_without_disk_space_raises_before_computing(tmp_path, monkeypatch):
    place = Workspace(tmp_path / "w")
    import_bars(synthetic_bars(days=5, seed=4).reset_index(), place, "MES")
    monkeypatch.setattr(files, "free_bytes", lambda folder: 900_000)
    monkeypatch.setattr(prepare, "build", lambda *_, **__: pytest.fail("computed all the same"))
    with pytest.raises(
        WorkspaceError, match=r"[Nn]ot enough space for the features and labels of MES .*0\.9 MB free.*about 1\.\d MB"
    ):
        pipeline.prepare(place, "MES", (5,))


def test_bytes_needed_estimate_matches_stored_bytes(prepared):
    store = DatasetStore.current(prepared.processed("DEMO"))
    taken = sum(file["bytes"] for name, file in store.files.items() if name.endswith(".npy") or "labels" in name)
    market, settings = MarketSpec.from_dict(store.facts["market"]), prove.stored_data_settings(store)
    bars = store.rows * 5  # what comes before the first row, over three sessions here, takes nothing
    needed = prepare.estimate_prepared_bytes(bars, market, settings, len(store.horizons), features=True)
    assert 0.8 * taken < needed < 1.5 * taken
