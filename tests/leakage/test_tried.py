"""A proof that was killed goes on with what it had tried, and ends as if nothing had happened."""

import json

import pytest

from ml_factory.leakage import proof as proving
from ml_factory.leakage.effort import ProofSpec
from ml_factory.leakage.proof import prove
from ml_factory.leakage.tried import Tried, horizons_tried
from tests.leakage.leaks import CATALOGUE, bars_with_events, clean_pipeline

SPEC = ProofSpec(cuts=3, whole_cuts=2, ways_a_cut=1, ahead=1_500, fit_rows=400, fit_splits=1, feed_rows=50)


class Killed(BaseException):
    """Not an Exception: a proof takes those for leaks."""


class Dying(Tried):
    """Keeps so many steps, and dies."""

    left = 0

    def save(self, told):
        super().save(told)
        Dying.left -= 1
        if not Dying.left:
            raise Killed


@pytest.fixture(scope="module")
def bars():
    return bars_with_events()


def outcome(found) -> dict:
    kept = ("form", "cuts", "disturbances", "compared", "leaks", "history")
    return {name: getattr(found, name) for name in kept} | {"builds": found.builds}


@pytest.fixture(scope="module")
def whole(bars):
    return outcome(prove(clean_pipeline(), bars, SPEC))


@pytest.mark.parametrize("kept", [1, 3, 6, 7])
def test_what_was_tried_is_not_tried_again(bars, tmp_path, monkeypatch, whole, kept):
    Dying.left = kept
    with pytest.raises(Killed):
        prove(clean_pipeline(), bars, SPEC, tried=Dying(tmp_path / "kept.json", "this"))
    steps = json.loads((tmp_path / "kept.json").read_text())["told"]["did"]
    assert len(steps) == kept
    built = []
    monkeypatch.setattr(proving, "disturb", lambda *a, real=proving.disturb: built.append(a[1]) or real(*a))
    again = prove(clean_pipeline(), bars, SPEC, tried=Tried(tmp_path / "kept.json", "this"))
    assert outcome(again) == whole
    done = {"facts": 0, "window 0": 2, "window 1": 2, "window 2": 2, "whole file 0": 1, "whole file 1": 1}
    facts = 4 * ("facts" not in steps)
    assert len(built) == facts + sum(builds for name, builds in done.items() if name not in steps)


def test_a_leak_that_was_found_is_not_forgotten(bars, tmp_path):
    leak = next(leak for leak in CATALOGUE if leak.part == "features" and leak.column)
    wanted = outcome(prove(leak.spoil(clean_pipeline()), bars, SPEC))
    assert wanted["leaks"]
    Dying.left = 4
    with pytest.raises(Killed):
        prove(leak.spoil(clean_pipeline()), bars, SPEC, tried=Dying(tmp_path / "kept.json", "this"))
    assert (
        outcome(prove(leak.spoil(clean_pipeline()), bars, SPEC, tried=Tried(tmp_path / "kept.json", "this"))) == wanted
    )


@pytest.mark.parametrize("harm", ["another proof", "torn", "edited", "other cuts"])
def test_what_is_kept_of_another_proof_or_not_whole_is_not_gone_on_from(bars, tmp_path, whole, harm):
    kept = Tried(tmp_path / "kept.json", "this", (5, 20))
    Dying.left = 3
    with pytest.raises(Killed):
        prove(clean_pipeline(), bars, SPEC, tried=Dying(kept.path, "this", (5, 20)))
    assert kept.load() and horizons_tried(kept.path) == (5, 20)
    text = kept.path.read_text()
    if harm == "torn":
        kept.path.write_text(text[:-30])
    elif harm == "edited":
        kept.path.write_text(text.replace('"window 0"', '"window 7"'))
    elif harm == "other cuts":
        kept.save(kept.load() | {"cuts": [1, 2, 3], "compared": {"features": 1}})
    else:
        kept = Tried(kept.path, "that")
    assert (kept.load() is None) == (harm != "other cuts")
    assert outcome(prove(clean_pipeline(), bars, SPEC, tried=kept)) == whole
    kept.forget()
    assert kept.load() is None and horizons_tried(kept.path) == ()
