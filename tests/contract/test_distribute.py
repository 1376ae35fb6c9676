"""`distribute`: a sweep on Ray gives what its verbs give one after another, whatever dies meanwhile."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.errors import FactoryError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors

ray = pytest.importorskip("ray")
SMALLEST = {"include_dashboard": False, "object_store_memory": 80_000_000}
MODELS = {"linear": {"rounds": 10}, "xgboost": {"rounds": 10}}
SWEEP = {
    "symbols": ["DEMO"], "horizons": [5], "models": MODELS, "folds": 2,
    "make": ["prepare", "train", "cross_validate", "stack", "evaluate"],
    "data": {"features.frames": [60], "features.families": ["momentum", "calendar"]},
}  # fmt: skip


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A function that makes a workspace with bars of eight days. A unit has one thread here, as it has on Ray."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(name: str) -> Workspace:
        workspace = Workspace(tmp_path / name)
        ensure_synthetic_demo_market(workspace, "DEMO", days=8)
        return workspace

    return make


@pytest.fixture(scope="module")
def two_cores():
    """Ray on this machine, for all tests of a process; its tasks are looked at more often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ml_factory.workflows.distribute.POLL_SECONDS", 0.05)
        ray.init("local", num_cpus=2, log_to_driver=False, **SMALLEST)
        yield
    ray.shutdown()


def trained_one_after_another(workspace: Workspace, models: dict, seeds=(0,)) -> dict[str, str]:
    """What the verbs make without Ray."""
    pipeline.prepare(workspace, "DEMO", (5,), settings=doors.SMALL_DATA)
    for seed in seeds:
        for name, own in models.items():
            pipeline.train(workspace, "DEMO", 5, name, model_settings=own, seed=seed)
    return made(workspace)


def made(workspace: Workspace) -> dict[str, str]:
    """Run id -> hash of its artifact."""
    return {one.facts["run_id"]: one.hash for one in doors.ArtifactRegistry(workspace.models).list("DEMO")}


# First: where a process has joined Ray, no address is tried.
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray.invalid:6379", "nowhere"])
def test_address_without_a_cluster_is_refused(address, prepared, call):
    words = ("--workspace", prepared.root, "--symbol", "DEMO", "--horizon", 5, "--trials", 1, "--ray", address)
    code, _, err = call("auto", *words)
    assert code == 2 and f"cluster does not answer [{address}]" in err, err


def test_sweep_makes_what_its_verbs_make_one_after_another(demo, prepared, two_cores):
    def to_do(**given) -> list[str]:
        sweep = SWEEP | {"make": ["prepare", "train", "stack"]} | given
        table = pipeline.distribute(prepared, sweep, dry_run=True).units
        return table["unit"][table["state"] == "to do"].tolist()

    swept, stack = demo("swept"), "stack DEMO 5 seed 0"
    result = pipeline.distribute(swept, SWEEP)
    assert result.failed == [] and list(result.units["state"]) == ["done"] * 7
    trained_one_after_another(prepared, MODELS)
    assert to_do() == [stack]
    pipeline.stack(prepared, "DEMO", 5, tuple(MODELS), model_settings=MODELS, folds=2)
    assert to_do() == []
    assert to_do(folds=3) == [stack]
    assert to_do(models=MODELS | {"linear": {"rounds": 11}}) == ["train DEMO 5 linear seed 0", stack]
    assert len(to_do(data={"labels.k_up": 1.5})) == 4
    assert made(swept) == made(prepared) and len(made(swept)) == 3
    assert (swept.results / "report.html").is_file()
    assert set(result.leaderboard["model"]) == {"linear", "xgboost", "stack"}
    before = {path: path.stat().st_mtime_ns for path in swept.models.rglob("*")}
    again = pipeline.distribute(swept, SWEEP | {"make": ["prepare", "train", "stack"]})
    assert again.failed == [] and {path: path.stat().st_mtime_ns for path in swept.models.rglob("*")} == before
    listed = pipeline.distribute(swept, SWEEP | {"seeds": [0, 2]}, dry_run=True)
    units = listed.units.set_index("unit")
    assert set(units.index[units["state"] == "to do"]) == {
        *(f"{verb} DEMO 5 {name} seed 2" for verb in ("train", "cross_validate") for name in MODELS),
        "stack DEMO 5 seed 2", "evaluate DEMO 5",
    }  # fmt: skip
    assert units.loc["train DEMO 5 linear seed 2", "minutes"] > 0


def test_failed_units_are_named_and_what_does_not_need_them_goes_on(prepared, two_cores, tmp_path, call):
    sweep = {"symbols": ["NOPE", "DEMO"], "horizons": [7, 5], "models": [*MODELS], "folds": 2, "quick": True}
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(sweep | {"make": ["train", "stack"]}))  # JSON is YAML
    code, out, err = call("distribute", file, "--workspace", prepared.root, "--json")
    assert code == 1, err
    found = json.loads(out)
    rows = {row["unit"]: row for row in found["units"]}
    assert [rows[name]["state"] for name in found["failed"]] == ["failed", "failed", "not run"] * 3
    assert [name for name in rows if "DEMO 5" not in name] == found["failed"]
    assert "horizon 7" in rows["train DEMO 7 linear seed 0"]["reason"]
    assert "train DEMO 7 linear" in rows["stack DEMO 7 seed 0"]["reason"]
    assert len(made(prepared)) == 3
    assert {(row["symbol"], row["model"]) for row in found["leaderboard"]} == {
        ("DEMO", name) for name in ("linear", "xgboost", "stack")
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"symbol": ["MES"]}, "did you mean 'symbols'"),
        ({"symbols": []}, "nothing to do"),
        ({"symbols": "MES"}, "several values"),
        ({"symbols": ["mes"]}, "use 'MES'"),
        ({"models": ["lightgmb"]}, "lightgbm"),
        ({"models": {"linear": {"round": 3}}}, "rounds"),
        ({"models": {"linear": 3}}, "models.linear"),
        ({"models": [], "make": ["train"]}, "nothing to do"),
        ({"make": ["trian"]}, "did you mean 'train'"),
        ({"horizons": [0]}, "HORIZON"),
        ({"seeds": [-1]}, "SEED"),
        ({"data": {"labels.k_upp": 1}}, "data.labels.k_upp"),
        ({"cores": 0}, r"cores.*\(0, inf\)"),
        ({"cores": float("inf")}, r"cores.*\(0, inf\)"),
        ({"folds": 0}, "folds"),
        ({"models": ["linear"]}, "two or more"),
        ({"models": "linear"}, "list of names"),
        ({"models": None}, "list of names"),
        ({"make": [["train"]]}, "list of names"),
        ({"data": {"labels": {"k_up": 1.2}}}, "labels.k_up"),
        ({"data": {1: 2}}, "Not settings by name"),
    ],
)
def test_wrong_sweep_is_refused_in_words_before_anything_starts(given, words, demo):
    with pytest.raises(FactoryError, match=f"(?s){words}"):
        pipeline.distribute(demo("w"), SWEEP | given)


@pytest.mark.parametrize(("given", "words"), [({"cores": 4096}, "cores.*at most 2"), ({"gpus": 1}, "gpus.*at most 0")])
def test_unit_that_no_machine_can_run_is_refused(given, words, demo, two_cores):
    with pytest.raises(FactoryError, match=f"(?s)No machine.*{words}"):
        pipeline.distribute(demo("w"), SWEEP | given)


def test_processes_on_ray_share_a_search(prepared, two_cores, call):
    options = {"--symbol": "DEMO", "--horizon": 5, "--trials": 3, "--folds": 2, "--ray": "local"}
    models = ("--model", "linear", "--model", "xgboost", "--set", "rounds=10", "--set", "threads=1")
    code, out, err = call("auto", "--workspace", prepared.root, *sum(options.items(), ()), *models, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [one["trial"] for one in found["trials"]] == [0, 1, 2] and "ray" in found["inexact_because"]
    assert "of 2 folds" not in err  # no trial was this process's
    assert {one["state"] for one in found["trials"]} == {"complete"} and doors.count_trials(prepared, "DEMO") == 4
    for one in found["trials"][:2]:  # which are the defaults, whatever process takes them
        alone = pipeline.cross_validate(
            prepared, "DEMO", 5, one["model"], folds=2, model_settings=one["settings"], mirror="off"
        ).folds
        assert alone.loc[alone["name"] == one["model"], "gain_best"].mean() == pytest.approx(one["gain"], abs=1e-12)


def test_processes_that_choose_the_same_settings_search_on(prepared, two_cores):
    fixed = {"linear": {"rounds": 10, "l2": 1.0, "clip": 8.0}}
    found = pipeline.auto(
        prepared, "DEMO", 5, trials=4, models=[*fixed], model_settings=fixed, folds=2, ray="local", mirror="off"
    )
    assert list(found.trials["state"]) == ["complete"] * 4 and found.trials["gain"].nunique() == 1


# ---- what dies -------------------------------------------------------------------------------------------------------

SLOW = {"xgboost": {"rounds": 4000}, "lightgbm": {"rounds": 1500}}  # some seconds, over several checkpoints


def wait_for(found, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.soak
def test_node_dies_in_mid_run(demo):
    from ray.cluster_utils import Cluster

    ray.shutdown()  # of the tests above
    swept, alone = demo("swept"), demo("alone")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **SMALLEST})
    other = cluster.add_node(num_cpus=1, object_store_memory=SMALLEST["object_store_memory"])
    killer = threading.Thread(
        target=lambda: (
            wait_for(lambda: len([*swept.checkpoints.glob("train-*/*.ckpt")]) > 1),
            cluster.remove_node(other, allow_graceful=False),
        )
    )
    ray.init(cluster.address, log_to_driver=False)
    try:
        killer.start()
        result = pipeline.distribute(swept, SWEEP | {"models": SLOW, "make": ["prepare", "train"], "seeds": [0, 1]})
    finally:
        killer.join()
        ray.shutdown()
        cluster.shutdown()
    assert result.failed == []
    assert made(swept) == trained_one_after_another(alone, SLOW, (0, 1))


@pytest.mark.soak
def test_search_on_ray_goes_on_where_a_process_dies(prepared, two_cores):
    def kill_one() -> None:
        wait_for(lambda: any('"folds"' in one.read_text() for one in prepared.results.rglob("journal.log")))
        next(one for one in psutil.process_iter() if one.name().startswith("ray::_run_task")).kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    own = {"lightgbm": SLOW["lightgbm"]}
    found = pipeline.auto(prepared, "DEMO", 5, trials=4, models=[*own], model_settings=own, folds=2, ray="local")
    killer.join()
    assert list(found.trials["trial"]) == [0, 1, 2, 3] and set(found.trials["state"]) == {"complete"}


OWN_FEATURE = """import numpy as np
from ml_factory.features.custom import feature

@feature(memory=4)
def own_spread(bars):
    return np.log(bars.high / bars.low)
"""


@pytest.fixture
def running_cluster(gcs_bucket, monkeypatch):
    """Address of a cluster of two cores that programs with its token join; its processes reach the bucket."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 32)
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    words = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2", f"--port={ports[0]}",
             f"--ray-client-server-port={ports[1]}", "--include-dashboard=false",
             f"--object-store-memory={SMALLEST['object_store_memory']}"]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    head = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    ready = [words[0], "health-check", "--address", f"127.0.0.1:{ports[0]}", "--component", "ray_client_server"]
    wait_for(lambda: subprocess.run(ready, capture_output=True).returncode == 0)
    yield f"ray://127.0.0.1:{ports[1]}"
    head.terminate()
    head.wait()


@pytest.mark.soak
def test_sweep_of_a_bucket_with_own_features_joins_a_running_cluster(demo, tmp_path, gcs_bucket, running_cluster):
    swept, alone, file, own = Workspace(gcs_bucket), demo("alone"), tmp_path / "sweep.yaml", tmp_path / "own_spread.py"
    ensure_synthetic_demo_market(swept, "DEMO", days=8)
    swept.push()
    own.write_text(OWN_FEATURE)
    data = SWEEP["data"] | {"features.custom": ["own_spread"]}
    file.write_text(json.dumps(SWEEP | {"make": ["prepare", "train", "stack"], "data": data}))
    words = [sys.executable, "-m", "ml_factory", "distribute", file, "--import", own.name, "--workspace"]
    subprocess.run([*words, gcs_bucket, "--ray", running_cluster], check=True, cwd=tmp_path)
    subprocess.run([*words, alone.root], check=True, cwd=tmp_path)
    assert made(swept) == made(alone) and len(made(alone)) == 3


@pytest.mark.soak
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_driver_says_that_the_same_command_resumes(number, code, demo, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(SWEEP | {"models": SLOW, "make": ["prepare", "train"]}))
    workspace = demo("w")
    words = [sys.executable, "-m", "ml_factory", "distribute", file, "--workspace", workspace.root]
    driver = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(lambda: [*workspace.checkpoints.glob("train-*/*.ckpt")])
    driver.send_signal(number)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == code and "The same command resumes" in err and "Traceback" not in err, err


@pytest.mark.soak
def test_driver_dies_and_the_sweep_starts_again(demo, tmp_path):
    swept, alone, file = demo("swept"), demo("alone"), tmp_path / "sweep.yaml"
    file.write_text(json.dumps(SWEEP | {"models": SLOW, "make": ["prepare", "train"], "seeds": [0, 1]}))  # JSON is YAML
    words = [sys.executable, "-m", "ml_factory", "distribute", file, "--workspace", swept.root]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    driver = subprocess.Popen(words, env=environment, start_new_session=True)
    wait_for(lambda: made(swept))
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    before = made(swept)
    assert len(before) < 4
    subprocess.run(words, env=environment, check=True, timeout=600)
    assert before.items() <= made(swept).items()
    assert made(swept) == trained_one_after_another(alone, SLOW, (0, 1))
