"""Profile of a training: its table, its flame graph, its line; and the same numbers as without."""

import shutil
import time
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pandas as pd
import pytest

from ml_factory import Workspace, pipeline
from ml_factory.errors import FactoryError
from ml_factory.evaluation.flame_graph import FlameBox, flame_graph_svg
from ml_factory.progress import progress_phase
from ml_factory.workflows import fit_profile
from ml_factory.workflows.fit_profile import PROFILED_STEPS, WARM_UP_STEPS, profile_fit, write_fit_profile

SMALL = {"xgboost": {"rounds": 20, "depth": 2}, "lstm": {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 64}}
SVG = "{http://www.w3.org/2000/svg}"


def slow_part(seconds: float) -> None:
    time.sleep(seconds)


def called_twice(seconds: float) -> None:
    slow_part(seconds)


def boxes_of(svg: bytes | str) -> list[tuple[str, float, float, float]]:
    """(title, left, right, top) of each box."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect").attrib
        left, width = float(box["x"]), float(box["width"])
        found.append((group.find(f"{SVG}title").text, left, left + width, float(box["y"])))
    return found


@pytest.mark.parametrize(("model", "named"), [("xgboost", "update (xgboost/core.py:"), ("lstm", "aten::")])
def test_train_with_profile_writes_table_and_graph_and_trains_same_numbers(model, named, prepared, tmp_path):
    shutil.copytree(prepared.root, tmp_path / "other")
    plain = pipeline.train(Workspace(tmp_path / "other"), "DEMO", 5, model, model_settings=SMALL[model], mirror="off")
    result = pipeline.train(prepared, "DEMO", 5, model, model_settings=SMALL[model], mirror="off", profile=True)
    assert (result.artifact_hash, result.predictions_hash) == (plain.artifact_hash, plain.predictions_hash)
    assert plain.profile is None and "time:" not in plain.summary()
    assert result.profile_path == result.report_path.parent / "profile"
    table = pd.read_csv(result.profile_path / "table.csv", index_col=0)
    assert table["seconds"].is_monotonic_decreasing and abs(table["share"].sum() - 1) < 1e-6
    assert any(name.startswith(named) for name in table.index) and table["calls"].min() >= 1
    line = next(line for line in result.summary().splitlines() if line.startswith("  time: "))
    assert table.index[0] in line and str(result.profile_path) in result.summary()
    boxes = boxes_of((result.profile_path / "flame_graph.svg").read_bytes())
    assert any(named in title for title, *_ in boxes) and len({top for *_, top in boxes}) > 3
    assert result.to_dict()["profile_path"] == str(result.profile_path)
    again = pipeline.train(prepared, "DEMO", 5, model, model_settings=SMALL[model], mirror="off", profile=True)
    assert again.reused and "not profiled" in again.summary() and "--fresh" in again.summary()


def test_profile_of_functions_names_the_slow_one_with_its_callers(tmp_path):
    with profile_fit("xgboost") as profile:
        slow_part(0.1)
        called_twice(0.3)
    slow = next(name for name in profile.table.index if name.startswith("slow_part"))
    assert profile.table.loc[slow, "calls"] == 2 and 0.4 <= profile.table.loc[slow, "total_seconds"] < 0.8
    assert "sleep" in profile.sentence().split(", ")[0]
    fields = write_fit_profile(profile, tmp_path)
    boxes = {title.partition(":")[0].split(" ")[0]: (left, right) for title, left, right, _ in
             boxes_of((fields["profile_path"] / "flame_graph.svg").read_text())}  # fmt: skip
    outer, inner = boxes["called_twice"], profile.root.below
    assert 0.6 < (outer[1] - outer[0]) / 1200 < 0.9  # 0.3 of 0.4 s
    twice = next(box for name, box in inner.items() if name.startswith("called_twice"))
    alone = next(box for name, box in inner.items() if name.startswith("slow_part"))
    assert 0.3 <= next(iter(twice.below.values())).seconds < 0.45 and 0.1 <= alone.seconds < 0.2


def test_profile_of_steps_records_so_many_after_the_first(monkeypatch):
    torch = pytest.importorskip("torch")
    with profile_fit("lstm") as profile, progress_phase("training", 10_000) as done:
        for step in range(WARM_UP_STEPS + PROFILED_STEPS + 20):
            if step >= WARM_UP_STEPS + PROFILED_STEPS or step < WARM_UP_STEPS:
                torch.linalg.inv(torch.eye(3))  # outside of what is recorded
            torch.ones(4).sum()
            done(1)
    assert profile.table.loc["aten::sum", "calls"] == PROFILED_STEPS
    assert "aten::linalg_inv" not in profile.table.index and f"{PROFILED_STEPS} steps" in profile.sentence()
    assert sum(box.seconds for box in profile.root.below.values()) == pytest.approx(profile.root.seconds, rel=0.05)


def test_profile_counts_kernel_of_accelerator_once():
    times = {"self_cpu_time_total": 2e6, "cpu_time_total": 3e6, "self_device_time_total": 5e6, "device_time_total": 7e6}
    rows = [SimpleNamespace(device_type=f"DeviceType.{kind}", **times) for kind in ("CPU", "CUDA")]
    assert [fit_profile._own_and_total_seconds(row) for row in rows] == [(2.0, 3.0), (5.0, 7.0)]


def test_profile_of_training_without_enough_steps_says_so(tmp_path):
    with profile_fit("lstm") as profile, progress_phase("training", 3) as done:
        done(1)
    assert "not profiled" in write_fit_profile(profile, tmp_path)["time_line"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["xgboost", "lstm"])
def test_profile_of_failed_training_stops_profiler_and_raises_its_error(model):
    for _ in range(2):
        with pytest.raises(KeyError), profile_fit(model), progress_phase("training", 100) as done:
            for _ in range(WARM_UP_STEPS + 2):
                done(1)
            raise KeyError


def test_profile_with_another_profiler_active_raises_what_to_do(monkeypatch):
    def refuse(self):
        raise ValueError("Another profiling tool is already active")

    monkeypatch.setattr(fit_profile.cProfile, "Profile", type("Profile", (), {"enable": refuse}))
    with pytest.raises(FactoryError, match="--profile"), profile_fit("xgboost"):
        pass


def test_flame_graph_boxes_lie_below_their_caller_and_names_are_escaped():
    root = FlameBox("all", 4.0)
    first, second = root.child('<a>&"b"'), root.child("second")
    first.seconds, second.seconds = 3.0, 1.0
    first.child("inner").seconds = 9.0  # more than its caller, as estimated times may be
    boxes = {
        title.rpartition(":")[0]: (left, right, top)
        for title, left, right, top in boxes_of(flame_graph_svg(root, "<t>"))
    }
    assert boxes["all"][:2] == (0, 1200) and boxes['<a>&"b"'][:2] == (0, 900) and boxes["second"][:2] == (900, 1200)
    assert boxes["inner"][:2] == (0, 900) and boxes["all"][2] < boxes["second"][2] < boxes["inner"][2]
