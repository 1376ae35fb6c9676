"""Artifacts by content: the newest by sequence, verified when loaded."""

import json
import os

import numpy as np
import pytest

from ml_factory.errors import CheckpointError, FactoryError, FileError, SettingsError, WorkspaceError
from tests.contract.doors import ArtifactRegistry, fingerprint_json, serialize_state


@pytest.fixture
def registry(tmp_path):
    return ArtifactRegistry(tmp_path / "models")


def put(registry, value, horizon=20, name="xgboost", symbol="ES", kind="model"):
    return registry.register(symbol, kind, name, {"value": np.full(3, value)}, {"horizon": horizon, "value": value})


def forge(artifact, **changes):
    """Change an artifact's description as someone would who can write to the folder: its checksum fits."""
    record = json.loads((artifact.path / "artifact.json").read_text()) | changes
    del record["checksum"]
    (artifact.path / "artifact.json").write_text(json.dumps({**record, "checksum": fingerprint_json(record)}))


def test_registry_register_find_and_load_return_same_artifact(registry, tmp_path):
    artifact = put(registry, 1)
    assert artifact.path == tmp_path / "models/ES" / f"model-xgboost-{artifact.hash[:12]}"
    found = registry.find("ES", 20, "xgboost")
    assert found == artifact and found.load_state()["value"].tolist() == [1, 1, 1]
    for question in (("NQ", 20, "xgboost"), ("ES", 10, "xgboost"), ("ES", 20, "lstm")):
        assert registry.find(*question) is None
    assert registry.find("ES", kind="stack") is None and registry.find("ES", colour="red") is None
    assert registry.find("ES") == registry.find("ES", value=1, kind="model") == artifact


def test_registry_find_returns_highest_sequence_regardless_of_mtime(registry):
    artifacts = [put(registry, value) for value in (3, 1, 2)]
    assert [one.sequence for one in artifacts] == [1, 2, 3]
    for number, artifact in enumerate(artifacts):
        os.utime(artifact.path / "artifact.json", (10**9 - number,) * 2)
    assert registry.find("ES", 20, "xgboost") == artifacts[2]
    again = put(registry, 3)  # the same content: no new space, but the newest now
    assert again.path == artifacts[0].path and again.sequence == 4
    assert registry.find("ES", 20) == again and len(registry.list("ES")) == 3


def test_registry_facts_are_returned_as_json_values(registry):
    registry.register("ES", "model", "lstm", {}, {"loss": np.float64("nan"), "rows": np.int64(5), "frames": (15, 30)})
    assert registry.find("ES").facts == {"loss": None, "rows": 5, "frames": [15, 30]}


def test_registry_find_ignores_interrupted_registration(registry):
    whole = put(registry, 1)
    half = whole.path.with_name("model-xgboost-0123456789ab")
    half.mkdir()
    (half / "state.safetensors").write_bytes(serialize_state({}))
    assert registry.find("ES") == whole


def test_registry_load_of_damaged_artifact_raises_with_file_name(registry, caplog):
    old, new = put(registry, 1), put(registry, 2)
    assert new.is_intact()
    (new.path / "state.safetensors").write_bytes(serialize_state({"value": 0}))
    assert old.is_intact() and not new.is_intact()
    with pytest.raises(CheckpointError, match=r"state\.safetensors.*another hash"):
        registry.find("ES").load_state()
    (new.path / "state.safetensors").unlink()
    assert not new.is_intact()
    with pytest.raises(WorkspaceError, match=r"state\.safetensors"):
        registry.find("ES").load_state()
    record = json.loads((new.path / "artifact.json").read_text())
    for text in (
        "{",
        "[]",
        "{}",
        json.dumps({**record, "version": 4}),
        json.dumps({**record, "sequence": "9"}),
        json.dumps({**record, "made_from": []}),
    ):
        (new.path / "artifact.json").write_text(text)
        caplog.clear()
        assert registry.find("ES") == old
        assert len(caplog.records) == 1 and new.path.name in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {"run_id": "../../../../outside"}}, {"facts": {"run_id": "a\\b"}}, {"facts": {"run_id": 7}},
        {"facts": []}, {"registered_at": 5},
        {"symbol": "../ES"}, {"symbol": "NQ"}, {"symbol": 5}, {"kind": "../model"}, {"name": "a/b"},
    ],
)  # fmt: skip
def test_registry_skips_artifact_of_another_symbol_type_or_name_that_leads_out(registry, changes, caplog):
    old, new = put(registry, 1), put(registry, 2)
    forge(new, **changes)
    assert registry.list("ES") == [old]
    assert len(caplog.records) == 1 and new.path.name in caplog.text


def test_registry_skips_artifact_whose_description_was_changed(registry, caplog):
    old, new = put(registry, 1), put(registry, 2)
    file = new.path / "artifact.json"
    record = json.loads(file.read_text())
    for name, value in {"facts": {"horizon": 20}, "sequence": 9, "made_from": {"run": "x"}, "checksum": None}.items():
        file.write_text(json.dumps(record | {name: value}))
        caplog.clear()
        assert registry.list("ES") == [old] and "changed" in caplog.text, name
    file.write_text(json.dumps(record))
    assert registry.list("ES") == [old, new]


def test_registry_register_through_symbolic_link_is_refused(registry, tmp_path):
    (tmp_path / "outside").mkdir()
    registry.folder.mkdir()
    (registry.folder / "ES").symlink_to(tmp_path / "outside")
    with pytest.raises(FileError, match="symbolic link"):
        put(registry, 1)
    assert not list((tmp_path / "outside").rglob("*.safetensors"))


def test_registry_register_with_invalid_names_raises(registry):
    for kind, name in (("../model", "x"), ("model", "a/b"), ("model", "a\\b")):
        with pytest.raises(FileError, match="cannot be a file's"):
            registry.register("ES", kind, name, {})
    with pytest.raises(SettingsError, match="'ES'"):
        registry.register("es", "model", "x", {})


def test_registry_concurrent_registrations_get_distinct_sequences(registry, tmp_path, spawn):
    code = """
import sys
from ml_factory.storage import artifact_registry as registry_module
from ml_factory.storage.artifact_registry import ArtifactRegistry
for i in range(8):
    ArtifactRegistry(sys.argv[1]).register("ES", "model", "m" + sys.argv[2], {"i": i})
"""
    processes = [spawn(code, tmp_path / "models", number) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert [one.sequence for one in registry.list("ES")] == list(range(1, 25))


# ---------------------------------------------------------------- lineage


def observed(registry, artifact):
    return [(*list(one.values())[:3], one["hash"][:8], one["available"]) for one in registry.lineage(artifact)]


def test_registry_lineage_of_nested_stack_matches_hand_built_tree(registry):
    """By hand: a pool on (a, b), b itself on a; a is registered twice with other content, and only one is meant."""
    a = registry.register("ES", "model", "lstm", {"v": 1}, {}, {"run": "train-1", "data": "d" * 64})
    registry.register("ES", "model", "lstm", {"v": 2}, {}, {"run": "train-9", "data": "e" * 64})
    b = registry.register("ES", "model", "gru", {"v": 3}, {}, {"run": "train-2", "models": {"lstm": a.hash}})
    top = registry.register(
        "ES", "stack", "stack", {"v": 4}, {}, {"data": "d" * 64, "models": {"lstm": a.hash, "gru": b.hash}}
    )
    below_a = [("run", "", "train-1", None), ("data", "", "dddddddd", None)]
    assert observed(registry, top) == [
        (0, "stack", "stack", top.hash[:8], True),
        (1, "data", "", "dddddddd", None),
        (1, "model", "lstm", a.hash[:8], True),
        *((2, *line) for line in below_a),
        (1, "model", "gru", b.hash[:8], True),
        (2, "run", "", "train-2", None),
        (2, "model", "lstm", a.hash[:8], True),
        *((3, *line) for line in below_a),
    ]
    assert registry.lineage(registry.find("ES", kind="stack")) == registry.lineage(top)  # as read from the disk


def test_registry_lineage_marks_absent_and_torn_artifacts_and_breaks_cycles(registry):
    base = registry.register("ES", "model", "lstm", {"v": 1})
    top = registry.register("ES", "stack", "stack", {"v": 2}, {}, {"models": {"lstm": base.hash, "gru": "f" * 64}})
    (base.path / "state.safetensors").write_bytes(b"torn")
    assert [line[-1] for line in observed(registry, top)] == [True, False, False]
    forge(base, made_from={"models": {"stack": top.hash}})
    assert [line[0] for line in observed(registry, top)] == [0, 1, 2, 1]


def test_import_artifact_accepts_whole_copy_and_rejects_altered_record(registry, tmp_path):
    there = ArtifactRegistry(tmp_path / "elsewhere").register(
        "ES", "model", "gru", {"v": 1}, {"horizon": 5}, {"data": "d" * 64}
    )
    put(registry, 1)
    taken = registry.import_artifact(there.path)
    assert taken.sequence == 2 and registry.find("ES", 5) == taken and taken.path.parent == registry.folder / "ES"
    assert (taken.hash, taken.facts, taken.made_from) == (there.hash, there.facts, there.made_from)
    whole = (there.path / "artifact.json").read_text()
    for broken in ({"name": "../../x"}, {"hash": "0" * 64}, {"symbol": "../x"}, {"sequence": None}):
        forge(there, **broken)
        with pytest.raises(FactoryError):
            registry.import_artifact(there.path)
        (there.path / "artifact.json").write_text(json.dumps({**json.loads(whole), **broken}))
        with pytest.raises(FactoryError):
            registry.import_artifact(there.path)
    assert [one.hash for one in registry.list("ES")][1:] == [there.hash] and not (tmp_path / "x").exists()
