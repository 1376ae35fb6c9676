"""A proof that was killed goes on with what it had tried, and ends as if nothing had happened."""

import json
from dataclasses import replace

import pytest

from ml_factory.leakage import proof as proving
from ml_factory.leakage.prefix_builds import PrefixBuild
from ml_factory.leakage.progress_file import ProofProgressFile, unfinished_proof_horizons
from ml_factory.leakage.proof import prove_no_look_ahead
from ml_factory.leakage.proof_spec import ProofSpec
from ml_factory.leakage.timed_tables import RAISED
from tests.leakage.catalogue import Learning, remade
from tests.leakage.leaks import CATALOGUE, bars_with_events, clean_pipeline

SPEC = ProofSpec(cuts=3, whole_cuts=2, ways_a_cut=1, ahead=1_500, fit_rows=400, fit_splits=3, feed_rows=50)
FITS = 11  # of a split: as it is, and in five ways for each set of rows that may be read


class Killed(BaseException):
    """Not an Exception: a proof takes those for leaks."""


class Dying(ProofProgressFile):
    """Keeps so many steps, and dies."""

    left = 0

    def save(self, reported):
        super().save(reported)
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
    return outcome(prove_no_look_ahead(clean_pipeline(), bars, SPEC))


@pytest.mark.parametrize("kept", [1, 3, 6, 7, 8, 9, 11, 13])
def test_prove_resumed_after_kill_skips_finished_steps(bars, tmp_path, monkeypatch, whole, kept):
    Dying.left = kept
    with pytest.raises(Killed):
        prove_no_look_ahead(clean_pipeline(), bars, SPEC, progress_file=Dying(tmp_path / "kept.json", "this"))
    steps = json.loads((tmp_path / "kept.json").read_text())["record"]["did"]
    assert len(steps) == kept
    built, fitted = [], []
    monkeypatch.setattr(
        proving, "perturb_future_bars", lambda *a, real=proving.perturb_future_bars: built.append(a[1]) or real(*a)
    )
    monkeypatch.setattr(Learning, "fit", lambda *a, real=Learning.fit: fitted.append(a) or real(*a))
    again = prove_no_look_ahead(
        clean_pipeline(), bars, SPEC, progress_file=ProofProgressFile(tmp_path / "kept.json", "this")
    )
    assert outcome(again) == whole
    done = {"facts": 0, "window 0": 2, "window 1": 2, "window 2": 2, "whole file 0": 1, "whole file 1": 1}
    facts = 4 * ("facts" not in steps)
    assert len(built) == facts + sum(builds for name, builds in done.items() if name not in steps)
    # One split has no validation rows: what is fitted on it reads one set of rows.
    fits = {"fitted h10 0": FITS, "fitted h10 1": 6, "fitted h10 2": 6}
    assert len(fitted) == sum(count for name, count in fits.items() if name not in steps)


def test_prove_resumed_after_kill_keeps_leaks_found_before(bars, tmp_path):
    leak = next(leak for leak in CATALOGUE if leak.part == "features" and leak.column)
    wanted = outcome(prove_no_look_ahead(leak.spoil(clean_pipeline()), bars, SPEC))
    assert wanted["leaks"]
    Dying.left = 4
    with pytest.raises(Killed):
        prove_no_look_ahead(
            leak.spoil(clean_pipeline()), bars, SPEC, progress_file=Dying(tmp_path / "kept.json", "this")
        )
    assert (
        outcome(
            prove_no_look_ahead(
                leak.spoil(clean_pipeline()),
                bars,
                SPEC,
                progress_file=ProofProgressFile(tmp_path / "kept.json", "this"),
            )
        )
        == wanted
    )


@pytest.mark.parametrize("harm", ["another proof", "torn", "edited", "other cuts"])
def test_proof_progress_of_other_proof_or_damaged_file_is_ignored(bars, tmp_path, whole, harm):
    kept = ProofProgressFile(tmp_path / "kept.json", "this", (5, 20))
    Dying.left = 3
    with pytest.raises(Killed):
        prove_no_look_ahead(clean_pipeline(), bars, SPEC, progress_file=Dying(kept.path, "this", (5, 20)))
    assert kept.load() and unfinished_proof_horizons(kept.path) == (5, 20)
    text = kept.path.read_text()
    if harm == "torn":
        kept.path.write_text(text[:-30])
    elif harm == "edited":
        kept.path.write_text(text.replace('"window 0"', '"window 7"'))
    elif harm == "other cuts":
        kept.save(kept.load() | {"cuts": [1, 2, 3], "compared": {"features": 1}})
    else:
        kept = ProofProgressFile(kept.path, "that")
    assert (kept.load() is None) == (harm != "other cuts")
    assert outcome(prove_no_look_ahead(clean_pipeline(), bars, SPEC, progress_file=kept)) == whole
    kept.forget()
    assert kept.load() is None and unfinished_proof_horizons(kept.path) == ()


def test_prove_resumed_many_times_reports_fit_leak_once(bars, tmp_path):
    """Also where what fails is what the fits stand on: built again, and told once."""

    class Fails(Learning):
        def splits(self, labels):
            if len(labels) <= SPEC.fit_rows:
                raise RuntimeError("no such split")
            return super().splits(labels)

    leak = next(leak for leak in CATALOGUE if leak.name == "ScalerOfAll")
    for pipeline in (leak.spoil(clean_pipeline()), remade(Fails)(clean_pipeline())):
        spec = replace(SPEC, cuts=1, whole_cuts=0, feed_rows=0)
        wanted = outcome(prove_no_look_ahead(pipeline, bars, spec))
        assert wanted["leaks"]
        kept = tmp_path / f"{type(pipeline).__name__}.json"
        for _ in range(20):
            Dying.left = 1
            try:
                found = prove_no_look_ahead(pipeline, bars, spec, progress_file=Dying(kept, "this"))
            except Killed:
                continue
            break
        assert outcome(found) == wanted


@pytest.mark.parametrize("step", ["labels", "splits"])
def test_prove_resumed_labels_or_splits_out_of_memory_does_not_pass(bars, tmp_path, monkeypatch, step):
    """Killed by a lack of memory, it may lack it again: fits that cannot be tried are not passed."""
    pipeline = next(leak for leak in CATALOGUE if leak.name == "ScalerOfAll").spoil(clean_pipeline())
    spec = replace(SPEC, cuts=1, whole_cuts=0, feed_rows=0)
    steps = ["facts", "window 0", "feed", "labels", "rule h10", "parts h10"]
    Dying.left = steps.index("labels" if step == "labels" else "parts h10") + 1
    with pytest.raises(Killed):
        prove_no_look_ahead(pipeline, bars, spec, progress_file=Dying(tmp_path / "kept.json", "this"))

    def lacks_memory(self, *asked):
        raise MemoryError("no room")

    def check_fitted_objects(attempt, *asked, real=proving._ProofRun.check_fitted_objects):
        monkeypatch.setattr(type(pipeline), step, lacks_memory)  # what stands before the fits needs it too
        real(attempt, *asked)

    monkeypatch.setattr(proving._ProofRun, "check_fitted_objects", check_fitted_objects)
    found = prove_no_look_ahead(pipeline, bars, spec, progress_file=ProofProgressFile(tmp_path / "kept.json", "this"))
    assert any("MemoryError" in leak.column for leak in found.leaks), found.leaks


def test_prove_resumed_with_failed_prefix_build_reports_leak(bars, tmp_path):
    """A feature that remembers what it has met is caught by a first sight, perhaps only the second time."""
    spec = replace(SPEC, cuts=1, whole_cuts=0, feed_rows=0)
    Dying.left = 2
    with pytest.raises(Killed):
        prove_no_look_ahead(clean_pipeline(), bars, spec, progress_file=Dying(tmp_path / "kept.json", "this"))
    sight = PrefixBuild(2_000, None, "it has met these bars")
    found = prove_no_look_ahead(
        clean_pipeline(),
        bars,
        spec,
        prefix_builds=[sight],
        progress_file=ProofProgressFile(tmp_path / "kept.json", "this"),
    )
    assert [leak.column for leak in found.leaks] == [f"{RAISED} it has met these bars"]
