"""Kinds of files that the library reads: where each lies in the workspace, how it is read, and how its hash is made
right after its values were changed.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from tests.fuzz.damage import damaged_bytes, damaged_value
from tests.fuzz.kind import Kind, damaged_json
from tests.fuzz.recipe_kinds import RECIPE_KINDS
from tests.interrupting_phase import InterruptingPhase

MODELS = ("linear", "xgboost", "lightgbm", "catboost", "gru")


# ---------------------------------------------------------------------- damage of values


def damaged_lines(data: bytes, generator: np.random.Generator) -> bytes:
    """Change a line of JSON lines, as `damaged_json` does."""
    lines = data.split(b"\n")
    place = int(generator.integers(len(lines)))
    lines[place] = damaged_json(lines[place] or b"1", generator)
    return b"\n".join(lines)


def damaged_state(data: bytes, generator: np.random.Generator) -> bytes:
    """Change a value of a state, or its bytes."""
    from ml_factory.errors import CheckpointError
    from ml_factory.storage.serialization import deserialize_state, serialize_state

    if generator.random() < 0.3:
        return damaged_bytes(data, generator)
    while True:
        value = damaged_value(deserialize_state(data), generator)
        try:
            return serialize_state(value)
        except (CheckpointError, UnicodeEncodeError):
            continue


def damaged_slot(data: bytes, generator: np.random.Generator) -> bytes:
    """Change a checkpoint below its seal, which is then made right."""
    from xxhash import xxh3_128

    from ml_factory.checkpoints import file_format

    seal = file_format._SEAL
    content, (_, sequence, _, end) = damaged_bytes(data[: -seal.size], generator), seal.unpack(data[-seal.size :])
    if generator.random() < 0.5:
        start = len(file_format._METADATA) + 8
        fields, length = json.JSONDecoder().raw_decode(data[start:4000].decode("ascii", "replace"))
        fields = damaged_value({name: _read_field(text) for name, text in fields.items()}, generator)
        texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in fields.items()}
        table_end = 8 + int.from_bytes(data[:8], "little")
        table = data[8:start] + json.dumps(texts, separators=(",", ":")).encode() + data[start + length : table_end]
        content = len(table).to_bytes(8, "little") + table + data[table_end : -seal.size]
        number = texts.get("sequence", "")
        sequence = int(number) if number.isdigit() and len(number) < 19 else sequence
    return content + seal.pack(xxh3_128(content).digest(), sequence, len(content) + seal.size, end)


def _read_field(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def damaged_bundle(data: bytes, generator: np.random.Generator) -> bytes:
    """Change a value of a bundle's description, its model or its guard's reference, and make its hashes right."""
    from ml_factory.inference.bundle import Bundle
    from ml_factory.storage.serialization import deserialize_state

    state = deserialize_state(data)
    facts, models, reference = state["description"], state["models"], state["reference"]
    draw = generator.random()
    if draw < 0.3:
        reference = damaged_state(reference, generator)
    elif draw < 0.6:
        models = {name: damaged_state(model, generator) for name, model in models.items()}
    else:
        while not isinstance(facts := damaged_value(facts, generator), dict):
            facts = state["description"]
    try:
        return Bundle.from_parts(facts, models, b"", reference).to_bytes()
    except (ValueError, TypeError):  # not finite: the file cannot have a right fingerprint
        return damaged_bytes(data, generator)


def seal_prepared(root: Path, file: Path) -> list[Path]:
    """Write the damaged file's size and hash into its data set's manifest."""
    import hashlib

    from ml_factory.datasets.memmap import cached_file_hash
    from ml_factory.storage.json_values import fingerprint_json

    changed = []
    for path in (root / "data/processed/DEMO").glob("*/manifest.json"):
        manifest, data = json.loads(path.read_bytes()), file.read_bytes()
        names = [name for name in manifest["files"] if (path.parent / name).resolve() == file.resolve()]
        for name in names:
            digest = cached_file_hash(file) if file.suffix == ".npy" else hashlib.sha256(data).hexdigest()
            manifest["files"][name] = {"hash": digest, "bytes": len(data)}
        if names:
            content = {name: one for name, one in manifest.items() if name != "hash"}
            path.write_text(json.dumps({**content, "hash": fingerprint_json(content)}))
            changed.append(path)
    return changed


# ---------------------------------------------------------------------- readers


def read_checkpoint(root: Path) -> object:
    from ml_factory.checkpoints.manager import CheckpointManager

    with CheckpointManager(root / "checkpoints", run="fuzz", background=False) as manager:
        manager.list_checkpoints()
        manager.load_latest_checkpoint("train_xgboost")
        return (manager.load_latest_checkpoint("phase") or {}).get("state")


def read_lease(root: Path) -> object:
    from ml_factory.checkpoints.disk import Disk
    from ml_factory.checkpoints.leases import lease_fence_order, read_lease_file
    from ml_factory.checkpoints.slot_pool import CheckpointUnit

    return lease_fence_order(read_lease_file(Disk(), root / "checkpoints", CheckpointUnit("fuzz", "phase")))


def read_lock(root: Path) -> object:
    """Own a lock whose last owner has ended; what it wrote there is then overwritten."""
    from ml_factory.storage.locks import acquire_lock_file, release_lock_file

    lock = root / "copied.lock"
    lock.write_bytes((root / "note.lock").read_bytes())
    acquire_lock_file(lock, "this")
    release_lock_file(lock)
    return True


def read_packed(root: Path) -> object:
    """Restore a packed run, as one that W&B returned."""
    import tempfile

    from ml_factory.checkpoints.manager import CheckpointManager
    from ml_factory.tracking.run_snapshot import RunSnapshot

    with tempfile.TemporaryDirectory() as folder:
        snapshot = RunSnapshot("fuzz", folder, ("fuzz",))
        with CheckpointManager(folder, run="fuzz", background=False) as manager:
            snapshot.restore_into(root / "packed", manager.store.home, 3)
            return (manager.load_latest_checkpoint("phase") or {}).get("state")


def read_artifact(root: Path, model: str) -> object:
    from ml_factory.storage.artifact_registry import ArtifactRegistry

    artifact = ArtifactRegistry(root / "models").find("DEMO", 5, model)
    return None if artifact is None else predicted(artifact.load_state())


def read_registry(root: Path) -> object:
    """List all artifacts, with their sources."""
    from ml_factory.storage.artifact_registry import ArtifactRegistry

    registry = ArtifactRegistry(root / "models")
    return [repr(registry.lineage(artifact)) for artifact in registry.list("DEMO")]


def read_bundle(root: Path) -> object:
    from ml_factory.inference.bundle import Bundle
    from ml_factory.inference.guard.guarded_stream import GuardedStream
    from ml_factory.storage.workspace import Workspace

    bars = pd.read_parquet(Workspace(root).raw_bars("DEMO"))
    bundle = Bundle.load(root / "model.bundle")
    guarded = GuardedStream(bundle, cold=False).push(bars.iloc[:4000])
    reasons = guarded[["guard", "reason"]].to_numpy().astype(str)
    return [bundle.predict(bars, all_rows=True).iloc[:, :3].to_numpy(), guarded.iloc[:, :3].to_numpy(), reasons]


def read_onnx_graphs(root: Path) -> object:
    from ml_factory.inference.bundle import Bundle
    from ml_factory.inference.onnx_models import OnnxModels

    features = len(Bundle.load(root / "model.bundle").description["feature_names"])
    rows = np.zeros((12, features), np.float32)
    found = []
    for path in sorted(root.glob("*.onnx")):
        models = OnnxModels(path.read_bytes(), 6 if path.stem == "gru" else 0).checked(features, path)
        found.append(models.predict_rows(rows, np.arange(8, 12)))
    return found


def predicted(state: dict) -> object:
    from ml_factory.evaluation.calibration import Calibration
    from ml_factory.inference.trained_model import TrainedModel
    from ml_factory.models.registry import build_model_from_state

    bundle = TrainedModel.from_state(state)
    Calibration.from_dict(bundle.calibration)
    return predictions_of(build_model_from_state(bundle.model_state))


def predictions_of(model: object) -> object:
    generator = np.random.default_rng(0)
    if hasattr(model, "n_features"):
        return model.predict_proba(generator.normal(size=(64, model.n_features)).astype(np.float32))
    return model.predict_proba(generator.normal(size=(8, 6, model.features)).astype(np.float32))


def read_model_state(root: Path, model: str) -> object:
    """Read a state whose hash is right: only the loader's own checks protect from what is in it."""
    from ml_factory.storage.serialization import deserialize_state

    return predicted(deserialize_state((root / f"{model}.state").read_bytes()))


def training_rows(model: str) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    shape = (120, 6, 4) if model == "gru" else (120, 4)
    return generator.normal(size=shape).astype(np.float32), generator.integers(-1, 2, 120)


def build_small_model(model: str) -> object:
    from ml_factory.models.registry import build_model

    settings = (
        {"epochs": 2, "hidden": 4, "lookback": 6, "batch": 40}
        if model == "gru"
        else {"rounds": 20, "block": 10, "threads": 1}
    )
    return build_model(model, **settings)


def read_training(root: Path, model: str) -> object:
    """Resume a training from a state whose hash is right."""
    from ml_factory.storage.serialization import deserialize_state

    phase = InterruptingPhase(-1)
    phase.state = deserialize_state((root / f"training-{model}.state").read_bytes())
    fitted = build_small_model(model)
    fitted.fit(*training_rows(model), checkpoints=phase)
    return predictions_of(fitted)


def read_prepared(root: Path) -> object:
    from ml_factory.workflows.load_prepared import load_dataset

    data = load_dataset(root, "DEMO", 5)
    return [np.asarray(data.x_NF), data.labels.to_numpy(dtype=object).astype(str)]


def read_certificate(root: Path) -> object:
    from ml_factory import pipeline

    return repr(pipeline.certificate(root, "DEMO", 5))


def read_proof(root: Path) -> object:
    from ml_factory.leakage.progress_file import ProofProgressFile, unfinished_proof_horizons

    path = root / "proof.json"
    return [list(unfinished_proof_horizons(path)), ProofProgressFile(path, "0" * 64, (5,)).load()]


def read_run_log(root: Path) -> object:
    from ml_factory.tracking.run_log import read_log_steps

    return read_log_steps(*sorted((root / "results" / "DEMO").glob("*/log")))


def read_run_records(root: Path) -> object:
    from ml_factory.run_folder import RunFolder
    from ml_factory.storage.files import files
    from ml_factory.storage.workspace import Workspace
    from ml_factory.tracking.log_upload import is_log_complete
    from ml_factory.workflows.runs.run_status import _mismatch, _read_run_machine, _run_records
    from ml_factory.workflows.runs.stored_runs import read_stored_runs

    found = []
    for path in _run_records(root / "results" / "DEMO"):
        run, stored = RunFolder(path.parent.name, path.parent.parent), files.read_json_or_none(path)
        found += [repr(run.ended), is_log_complete(path.parent / "log"), repr(_read_run_machine(run))]
        wanted = {"settings": {"a": 1}, "data": "x"}
        if isinstance(stored, dict) and isinstance(stored.get("run_id"), str):
            found.append(repr(_mismatch(path, stored, wanted, {"models/a.py": "x"})))
    for one in read_stored_runs(Workspace(root), "DEMO").runs:
        found.append([one.run_id, one.task, list(one.models), list(one.bases), one.data, one.ended, one.begun_at])
    return found


def read_lifetimes(root: Path) -> object:
    from ml_factory.checkpoints.session_lifetimes import SessionLifetimeLog

    return SessionLifetimeLog(root / "sessions", now=lambda: 1e9).mean_life(3600.0)


def read_predictions(root: Path) -> object:
    from ml_factory.workflows.predictions import read_prediction_frame

    return read_prediction_frame(root / "predictions.parquet").to_numpy()


def read_label_spec(root: Path) -> object:
    from ml_factory.targets.barrier_search_spec import SearchedLabelSpec

    return SearchedLabelSpec.from_json((root / "labels.json").read_text(errors="replace")).to_json()


def read_bars(root: Path, name: str) -> object:
    from ml_factory.data.io import import_bars
    from ml_factory.storage.workspace import Workspace

    return import_bars(root / name, Workspace(root / "other"), "MES").fingerprint


def read_settings(root: Path, name: str) -> object:
    from ml_factory.commands.dataclass_options import _lines, _read_table

    table = _read_table(root / name)
    return [table, list(_lines(table.get("set", {})) if isinstance(table.get("set", {}), dict) else [])]


def read_notebook(root: Path) -> object:
    from ml_factory.notebook_parameters import read_notebook_parameters

    return repr(read_notebook_parameters(root / "a.ipynb"))


def read_delivery_mark(root: Path) -> object:
    from ml_factory.serving.follow import _DeliveryMark

    mark = _DeliveryMark(root / "delivered.json", "2024-01-05T15:00:00+00:00")
    return [mark.is_before("2024-01-05T14:00:00+00:00"), mark.is_before("2024-01-05T15:00:01+00:00")]


PREPARED = "data/processed/DEMO/**/*"
KINDS = {
    "checkpoint": Kind("checkpoints/slot-*", read_checkpoint),
    "checkpoint, right hash": Kind("checkpoints/slot-*.ckpt", read_checkpoint, False, damaged_slot),
    "slot manifest": Kind("checkpoints/slot-*.json", read_checkpoint, True, damaged_json),
    "lease": Kind("checkpoints/leases/*.json", read_lease, False, damaged_json),
    "lock": Kind("note.lock", read_lock, False, damaged_json),
    "packed run": Kind("packed/*", read_packed),
    "packed run, values": Kind("packed/parts.json", read_packed, True, damaged_json),
    "prepared data": Kind(PREPARED, read_prepared),
    "prepared array, right hash": Kind(
        "data/processed/DEMO/*/*.npy", read_prepared, False, damaged_bytes, seal_prepared
    ),
    "prepared file, right hash": Kind(
        "data/processed/DEMO/*/*_h5.*", read_prepared, False, damaged_bytes, seal_prepared
    ),
    "prepared JSON, right hash": Kind(
        "data/processed/DEMO/*/s*.json", read_prepared, False, damaged_json, seal_prepared
    ),
    "manifest, right hash": Kind(
        "data/processed/DEMO/*/manifest.json", read_prepared, False, partial(damaged_json, seal="hash")
    ),
    "certificate": Kind("data/processed/DEMO/certificates/**/*", read_certificate),
    "certificate, right hash": Kind(
        "data/processed/DEMO/certificates/**/*.json", read_certificate, False, partial(damaged_json, seal="hash")
    ),
    "proof": Kind("proof.json", read_proof, False, partial(damaged_json, seal="hash")),
    "registry": Kind("models/DEMO/*/artifact.json", read_registry, False, damaged_json),
    "run log": Kind("results/DEMO/*/log/*.jsonl", read_run_log, False, damaged_lines),
    "run records": Kind("results/DEMO/**/*.json", read_run_records, False, damaged_json),
    "session lifetimes": Kind("sessions/*.json", read_lifetimes, False, damaged_json),
    "predictions": Kind("predictions.parquet", read_predictions, False),
    "bundle": Kind("model.bundle", read_bundle),
    "ONNX graph": Kind("*.onnx", read_onnx_graphs, False),
    "bundle, right hash": Kind("model.bundle", read_bundle, False, damaged_bundle),
    "label spec": Kind("labels.json", read_label_spec, False, damaged_json),
    "delivery mark": Kind("delivered.json", read_delivery_mark, False, damaged_json),
    "notebook": Kind("a.ipynb", read_notebook, False),
    "notebook, values": Kind("a.ipynb", read_notebook, False, damaged_json),
    "settings.toml": Kind("settings.toml", partial(read_settings, name="settings.toml"), False),
    "settings.json": Kind("settings.json", partial(read_settings, name="settings.json"), False, damaged_json),
    **RECIPE_KINDS,
}
for _model in MODELS:
    KINDS[f"artifact {_model}"] = Kind(f"models/DEMO/*{_model}*/*", partial(read_artifact, model=_model))
    KINDS[f"model {_model}"] = Kind(f"{_model}.state", partial(read_model_state, model=_model), False, damaged_state)
    KINDS[f"training {_model}"] = Kind(
        f"training-{_model}.state", partial(read_training, model=_model), False, damaged_state
    )
for _name in ("bars.csv", "bars.csv.gz", "bars.parquet"):
    KINDS[_name] = Kind(_name, partial(read_bars, name=_name), False)
