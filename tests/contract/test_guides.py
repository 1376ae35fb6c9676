"""What the users' guides promise, entry by entry: docs/guides.md has a row for each, and each row names its test.

The guides themselves are not part of the project: their headings stand here, and snippets in this project's own words.
"""

import ast
import cProfile
import gc
import json
import re
import shutil
import subprocess
import types
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ml_factory import CheckpointManager, Workspace, pipeline
from ml_factory.models.registry import build_model
from tests.contract import doors
from utils import colab_setup
from utils.colab_setup import estimate_training_time_remaining, setup_colab_environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "colab_notebooks"
GUIDE = (ROOT / "docs" / "guides.md").read_text(encoding="utf-8")
# Headings under which a guide promises something; those that only group others are left out.
COLAB = (
    "Overview", "1. Upload Data to Google Drive", "2. Open Notebooks in Colab", "3. Run Notebooks in Sequence",
    "Step 1: Setup Environment", "Step 2: Run Data Pipeline", "Step 3: Train Models", "Step 4: Train Ensemble",
    "Notebook Reference", "What Happens on Disconnect?", "How to Resume After Disconnect",
    "1. Enable GPU Before Training", "2. Monitor Session Time", "3. Use Local Disk for Fast I/O",
    "4. Clean Up Memory", "5. Use Mixed Precision Training", 'Problem: "Runtime disconnected"',
    'Problem: "Out of memory (OOM)"', 'Problem: "Checkpoint not found"', 'Problem: "Training too slow"',
    "Colab Free Tier", "Colab Pro", "Google Drive Storage", "Multi-Session Parallel Training",
    "Programmatic Notebook Execution", "Custom Checkpoint Logic", "FAQ", "Next Steps",
)  # fmt: skip
TPU = (
    "1. Why Move?", "2. Prerequisites", "Phase 1: Data Export", "Phase 2: ", "Phase 3: Metrics", "Phase 4: Deployment",
    "4. Cost Savings", "5. Next Steps",
)  # fmt: skip
SDCE = (
    "Quick Start", "Training Examples", "Config File", "Loss Types", "Key Options", "TPU Notes", "Cloud TPU v4 Setup",
    "TPU v4-32 Training Config", "Dependency Versions", "Manual TPU Pod Setup", "Cleanup",
)  # fmt: skip
RESNET = ("Setup", "Create a TPU Pod slice", "PyTorch Training", "Train the model", "Cleaning up")
T5 = ("1. Create a TPU", "1.5 ", "2. Get Ready", "2. Fine-tuning T5", "3. Reduce model size: pruning",
      "3. Reduce model size: quantization")  # fmt: skip
TABLES = {
    "Google Colab training guide": COLAB, "Migration to Cloud TPUs": TPU, "SDCE training": SDCE,
    "Scaling with WebDataset and ResNet-50": RESNET, "TPUs and a T5": T5,
}  # fmt: skip
FAQ = ("pipeline for every model", "switch between symbols", "production inference", "Drive storage", "delete old")
GONE = ("xrt_world_size", "xmp.spawn", "wheel's URL is gone", "flat fee", "V100", "DVC")
FAMILIES = {
    "02_train_tabular": ("xgboost", "lightgbm", "catboost"), "03_train_sequence": ("lstm", "gru", "tcn"),
    "04_train_advanced": ("patchtst", "tft", "itransformer"),
}  # fmt: skip


def rows(section: str) -> list[list[str]]:
    """The cells of every table row below a heading of docs/guides.md, up to the next one."""
    text = GUIDE.split(f"## {section}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_guide_table_has_row_per_heading_and_existing_test_per_row():
    for section, headings in TABLES.items():
        found = [row for row in rows(section) if len(row) == 3 and row[0] != "entry"]
        for heading in headings:
            assert [row for row in found if row[0].startswith(heading)], heading
        for entry, _, shown in found:
            path, _, test = shown.strip("`").partition("::")
            names = {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
            assert not test or test in names, entry
    assert all(f"FAQ: {question}" in GUIDE for question in FAQ)
    assert all(word in GUIDE for word in GONE)


def test_guide_models_are_declared_by_named_notebooks():
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == list(doors.NOTEBOOKS)
    for notebook, models in FAMILIES.items():
        declared = doors.read_notebook_parameters(FOLDER / f"{notebook}.ipynb")
        assert declared["MODEL"].default in models and {doors.find_model_spec(name).notebook for name in models} == {
            notebook
        }
    for name in doors.NOTEBOOKS[2:]:
        assert doors.read_notebook_parameters(FOLDER / f"{name}.ipynb")["SETTINGS"].default == ""


def test_guide_setup_cell_returns_env_info_with_workspace(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ML_FACTORY_ROOT", str(tmp_path))
    monkeypatch.setattr(colab_setup, "mount_drive", lambda *_: pytest.fail("mounted"))
    env_info = setup_colab_environment(...)
    assert env_info["workspace"].root == tmp_path == env_info.workspace.root


def test_guide_session_snippet_prints_remaining_hours(monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "100000")
    remaining = estimate_training_time_remaining()
    assert isinstance(remaining, float) and re.fullmatch(
        r"Time remaining: \d+\.\d hours", f"Time remaining: {remaining:.1f} hours"
    )
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "0.001")
    assert estimate_training_time_remaining() < 2.0


def test_guide_local_copy_and_memory_snippets_run(tmp_path):
    drive, local = tmp_path / "drive" / "MES_1m.parquet", tmp_path / "data" / "MES_1m.parquet"
    for path in (drive, local):
        path.parent.mkdir()
    pd.DataFrame({"close": [1.0, 2.0]}).to_parquet(drive)
    shutil.copy(drive, local)
    large_dataframe = pd.read_parquet(local)
    assert large_dataframe.equals(pd.read_parquet(drive))
    del large_dataframe
    torch.cuda.empty_cache()
    gc.collect()


def test_guide_mixed_precision_snippet_runs_with_future_warning():
    from torch.cuda.amp import GradScaler, autocast

    model = torch.nn.Linear(2, 1)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        scaler = GradScaler()
        with autocast():
            loss = model(torch.ones(4, 2)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(model.weight, before)
    assert any("torch.amp" in str(one.message) for one in reported if issubclass(one.category, FutureWarning))


@pytest.mark.parametrize("name", FAMILIES)
def test_notebook_custom_callback_saves_checkpoint_of_best_epoch(name, tmp_path):
    cells = {
        cell["id"]: "".join(cell["source"]) for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    }
    model = build_model("linear", rounds=40, block=10, threads=1)
    ckpt_mgr = CheckpointManager(tmp_path, run="train-x", during_training=True)
    space = {"ckpt_mgr": ckpt_mgr, "model": model, "EpochLine": list, "LiveCurves": list}
    exec(re.search(r"```python\n(.*?)```", cells["about-callbacks"], re.DOTALL)[1], space)
    exec(cells["callbacks"], space)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(90, 3)), rng.integers(-1, 2, 90)
    result = model.fit(x, y, validation=(x[::-1], y, None), callbacks=[space["CustomCheckpoint"]()])
    phase = re.search(r'phase="(train_\w+)"', cells["about-callbacks"])[1]
    best = min(result.history, key=lambda one: one["val_loss"])
    found = ckpt_mgr.load_latest_checkpoint(phase)["state"]
    assert found["epoch"] == best["epoch"] and found["model"]["best_round"] == 10 * best["epoch"]
    assert phase.removeprefix("train_") in FAMILIES[name]
    assert "estimator=model" in cells["train"] and "callbacks=callbacks" in cells["train"]


def test_guide_callback_that_stores_another_model_than_the_fitted_one_is_told_so_once(tmp_path, caplog):
    other, fitted = (build_model("linear", rounds=30, block=10, threads=1) for _ in range(2))
    ckpt_mgr = CheckpointManager(tmp_path, run="train-x", during_training=True)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(90, 3)), rng.integers(-1, 2, 90)
    for model, told in ((fitted, 0), (other, 1)):

        def save(epoch, metrics, model=model):
            ckpt_mgr.save_checkpoint(phase="train_x", state={"epoch": epoch, "model": model.get_state()}, force=True)

        fitted.fit(x, y, callbacks=[lambda epoch, metrics, save=save: save(epoch, metrics)])
        assert caplog.text.count("was never fitted. Next: pipeline.train(..., estimator=model)") == told


def test_guide_papermill_parameters_pass_notebook_check(capsys):
    source = next(
        "".join(cell["source"]) for cell in json.loads((FOLDER / "02_train_tabular.ipynb").read_text())["cells"]
        if "parameters" in cell["metadata"].get("tags", ())
    )  # fmt: skip
    given = {"SYMBOL": "MES", "HORIZON": 20, "MODEL": "xgboost"}
    injected = "# Parameters\n" + "\n".join(f"{name} = {value!r}" for name, value in given.items())
    names: dict = {"In": [source, injected]}
    exec(source, names)
    exec(injected, names)
    chosen = doors.check_parameters(family="tabular", shell=types.SimpleNamespace(user_ns=names))
    assert (chosen.symbol, chosen.horizon, chosen.model, chosen.settings) == ("MES", 20, "xgboost", {})


def test_checkpoint_manager_with_deleted_folder_loads_registered_model_and_saves(tmp_path):
    workspace = Workspace(tmp_path)
    state = {"model_state": {"model": "xgboost", "fitted": None}}
    facts = {"run_id": "train-xgboost-h5-s0-0123456789", "horizon": 5, "history": [{"epoch": 1, "val_loss": 1.0}]}
    doors.ArtifactRegistry(workspace.models).register("MES", "model", "xgboost", state, facts)
    for number in range(5):
        with CheckpointManager(workspace.checkpoints, run="r") as ckpt_mgr:
            ckpt_mgr.save_checkpoint("p", {"n": number}, force=True)
    assert len(CheckpointManager(workspace.checkpoints, run="r").list_checkpoints("p")) == 3
    for path in workspace.checkpoints.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    ckpt_mgr = CheckpointManager(workspace.checkpoints)
    found = ckpt_mgr.load_latest_checkpoint(phase="train_xgboost")
    assert found["state"] == {**state, "epoch": 1, "history": facts["history"]} and found["symbol"] == "MES"
    assert ckpt_mgr.save_checkpoint("p", {"n": 6}, force=True)
    assert ckpt_mgr.load_latest_checkpoint("p")["state"] == {"n": 6}


def test_guide_rm_of_checkpoints_keeps_finished_model_and_begins_killed_training_anew(prepared, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    settings = {"model_settings": {"rounds": 30}, "mirror": "off"}
    remove, lines = ["sh", "-c", f"rm -rf {prepared.root}/checkpoints/*"], []
    finished = pipeline.train(prepared, "DEMO", 5, "linear", **settings)
    predicted = pipeline.predict(prepared, "DEMO", 5, "linear").frame_hash

    def stop(epoch, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.train(prepared, "DEMO", 5, "linear", seed=1, callbacks=[stop], **settings)
    subprocess.run(remove, check=True)
    assert not list(prepared.checkpoints.iterdir())
    assert pipeline.predict(prepared, "DEMO", 5, "linear").frame_hash == predicted
    assert len(pipeline.load_features(prepared, "DEMO")) and len(
        pipeline.load_predictions(prepared, "DEMO", 5, "linear")
    )
    assert pipeline.train(prepared, "DEMO", 5, "linear", **settings).reused
    again = pipeline.train(prepared, "DEMO", 5, "linear", seed=1, on_status=lines.append, **settings)
    assert "no checkpoint of it is there. Starts from the beginning" in lines[0] and again.resumed_from is None
    in_the_middle = pipeline.train(  # while the training runs
        prepared,
        "DEMO",
        5,
        "linear",
        fresh=True,
        callbacks=[lambda *_: subprocess.run(remove, check=False)],
        **settings,
    )
    assert in_the_middle.history["val_loss"].tolist() == finished.history["val_loss"].tolist()


def test_guide_lines_on_profile_price_and_cleaning_work_from_command_line(prepared, call):
    where = ("--workspace", prepared.root, "--symbol", "DEMO")
    model = ("--horizon", 5, "--model", "linear", "--quick")
    code, _, _ = call("train", *where, *model)
    assert code == 0
    recorder = cProfile.Profile()  # as the guide says it, around a call of one's own
    trained = recorder.runcall(pipeline.train, prepared, "DEMO", 5, "linear", quick=True, seed=1, mirror="off")
    assert not trained.reused and "train_with_holdout" in str(recorder.getstats())
    code, out, _ = call("plan", *where, *model, "--seed", 2, "--units-per-hour", 1.76)
    assert code == 0 and "compute units at 1.76 an hour" in out
    code, out, _ = call("clean", *where, "--keep", 3, "--dry-run")
    assert code == 0 and "the newest 3 kept" in out


def test_dvc_page_has_three_commands_for_bucket_as_remote():
    page = (ROOT / "docs" / "dvc.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    assert blocks[1].splitlines() == ["dvc remote add --default bucket gs://bucket/dvc", "dvc add data/raw", "dvc push"]
    assert "(dvc.md)" in next(row for row in GUIDE.splitlines() if row.startswith("| FAQ: Drive storage"))


def test_artifact_versions_project_equals_dashboard_project():
    assert doors.WANDB_PROJECT == "ohlcv-ml-factory"
