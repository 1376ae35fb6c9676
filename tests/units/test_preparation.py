"""What `prepare` keeps of what a user said."""

import pytest

from ml_factory import pipeline
from ml_factory.data.sources import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.experiment import DataSpec
from ml_factory.runs.workspace import Workspace
from ml_factory.units import preparation


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("prepared"))
    import_bars(synthetic_bars(days=12, seed=4).reset_index(), made, "ODD")
    return made


def test_a_calendar_and_tick_once_given_hold_until_others_are(workspace):
    inferred = pipeline.prepare(workspace, "ODD", (10,))
    assert (inferred.market["calendar"], inferred.market["source"]["calendar"]) == ("cme", "inferred")
    given = pipeline.prepare(workspace, "ODD", (10,), settings=DataSpec(calendar="24h", tick=0.5))
    again = pipeline.prepare(workspace, "ODD", (10,))
    assert (again.fingerprint, again.reused) == (given.fingerprint, True)
    assert (again.market["calendar"], again.market["tick"]) == ("24h", 0.5)
    other = pipeline.prepare(workspace, "ODD", (10,), settings=DataSpec(calendar="cme"))
    assert (other.market["calendar"], other.market["tick"]) == ("cme", 0.5)


def test_the_picture_of_frames_shows_what_the_matrix_joined(workspace, monkeypatch):
    told = []
    monkeypatch.setattr(preparation.figures, "frame_alignment", lambda *parts: told.append(parts))
    pipeline.prepare(workspace, "ODD", (10,))
    preparation.frame_alignment(workspace, "ODD", row=700)
    base, coarse, visible, row = told[0]
    assert base.known_at[row] == pipeline.load_features(workspace, "ODD").index[700].value
    assert [frame.minutes for frame in coarse] == [15, 30, 60]
    for frame, seen in zip(coarse, visible, strict=True):
        newest = max(known for known in frame.known_at if known <= base.known_at[row])
        assert frame.known_at[seen[row]] == newest
