"""A workspace with a file of every kind that is read."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from tests.fuzz.kinds import MODELS, build_small_model, training_rows
from tests.fuzz.recipe_kinds import write_recipe_files
from tests.interrupting_phase import InterruptingPhase

ROOT = Path(__file__).resolve().parents[2]


def build_workspace(root: Path) -> None:
    """Make the workspace: a demo market prepared, five small models trained, and what reads nothing of these."""
    from ml_factory import pipeline
    from ml_factory.data.io import load_bars
    from ml_factory.data.synthetic import ensure_synthetic_demo_market
    from ml_factory.storage.workspace import Workspace

    os.environ["ML_FACTORY_WANDB"] = "off"
    place = Workspace(root)
    ensure_synthetic_demo_market(place, "DEMO", days=8)
    pipeline.prepare(place, "DEMO", (5,))
    _train(place, root)
    exported = pipeline.export(place, "DEMO", 5, "gru", formats=("bundle",))
    shutil.copy(exported.paths["bundle"], root / "model.bundle")
    for model in ("gru", "xgboost"):
        graph = pipeline.export(place, "DEMO", 5, model, formats=("onnx",)).paths["onnx"]
        shutil.copy(graph, root / f"{model}.onnx")
    _save_checkpoints(place, root)
    _write_small_files(root)
    write_recipe_files(root)
    bars = load_bars(place, "DEMO")[0].head(800).reset_index()
    bars.to_csv(root / "bars.csv", index=False)
    bars.to_csv(root / "bars.csv.gz", index=False)
    bars.to_parquet(root / "bars.parquet", index=False)
    bars.to_parquet(root / "predictions.parquet", index=False)


def _train(place, root: Path) -> None:
    from ml_factory import pipeline
    from ml_factory.storage.artifact_registry import ArtifactRegistry
    from ml_factory.storage.serialization import write_state_file

    for model in MODELS:
        settings = {"epochs": 1, "hidden": 8, "lookback": 6} if model == "gru" else {}
        pipeline.train(place, "DEMO", 5, model, quick=True, model_settings=settings)
        artifact = ArtifactRegistry(place.models).find("DEMO", 5, model)
        (root / f"{model}.state").write_bytes((artifact.path / "state.safetensors").read_bytes())
        phase = InterruptingPhase(1)
        try:
            build_small_model(model).fit(*training_rows(model), checkpoints=phase)
        except KeyboardInterrupt:
            write_state_file(root / f"training-{model}.state", phase.state)


def _save_checkpoints(place, root: Path) -> None:
    from ml_factory.checkpoints.manager import CheckpointManager
    from ml_factory.tracking.run_snapshot import RunSnapshot

    with CheckpointManager(place.checkpoints, run="fuzz", background=False) as manager:
        state = {"weights": np.arange(500.0), "epoch": 3, "history": [0.5, 0.4], "names": {"a": "b"}}
        for _ in range(2):
            manager.save_checkpoint("phase", state, metrics={"val_loss": 0.5, "best": float("inf")}, force=True)
        (root / "packed").mkdir()
        RunSnapshot("fuzz", str(place.checkpoints), ("fuzz",)).pack(root / "packed")


def _write_small_files(root: Path) -> None:
    from ml_factory.checkpoints.session_lifetimes import SessionLifetimeLog
    from ml_factory.leakage.progress_file import ProofProgressFile
    from ml_factory.targets.barrier_search_spec import BarrierSearchRows, BarrierSearchSpec, SearchedLabelSpec
    from ml_factory.targets.labels import LabelSpec

    ProofProgressFile(root / "proof.json", "0" * 64, (5,)).save({"done": [1, 2], "leaks": []})
    for number in range(3):
        SessionLifetimeLog(root / "sessions", now=lambda number=number: 1e9 - 9_000 * number).record_alive(3.0)
    rows = BarrierSearchRows(*_example_rows())
    spec = SearchedLabelSpec(LabelSpec(), BarrierSearchSpec(), rows, {"loss": 0.5}, 20)
    (root / "labels.json").write_text(spec.to_json())
    (root / "note.lock").write_text(json.dumps({"pid": 1 << 22, "host": "x y", "since": 1.0}))
    (root / "delivered.json").write_text(json.dumps({"known_at": "2024-01-05T14:35:00+00:00"}))
    (root / "settings.toml").write_text('symbol = "MES"\nhorizon = 20\n[set]\nepochs = 3\nlearning_rate = 0.01\n')
    (root / "settings.json").write_text(json.dumps({"symbol": "MES", "horizon": 20, "set": {"epochs": 3}}))
    shutil.copy(ROOT / "colab_notebooks" / "02_train_tabular.ipynb", root / "a.ipynb")


def _example_rows() -> list:
    """Return a value of each field of `BarrierSearchRows`, by its type."""
    from dataclasses import fields

    from ml_factory.targets.barrier_search_spec import BarrierSearchRows

    return [0 if "int" in str(item.type) else "2024-01-01" for item in fields(BarrierSearchRows)]
