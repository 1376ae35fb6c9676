"""Registry of finished artifacts by content hash: written by training, read by stacking, evaluation and prediction.

    models/{SYMBOL}/{kind}-{name}-{hash12}/state.safetensors   the numbers
                                           artifact.json       hash, facts, sequence, and a checksum of these; last

A folder without `artifact.json` is an interrupted registration and does not exist for `find`. The newest artifact is
the one with the highest sequence number; file times are never used. Each artifact names the hashes of its sources:
`ArtifactRegistry.lineage` walks from a stack over its models to their runs and data.
"""

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.errors import CheckpointError, FileError
from ml_factory.redaction import redact_values
from ml_factory.storage.files import REMOVED, files, is_plain_name, stored_path
from ml_factory.storage.json_values import fingerprint_json, to_json_value
from ml_factory.storage.locks import file_lock
from ml_factory.storage.serialization import deserialize_state, serialize_state
from ml_factory.storage.workspace import check_symbol

VERSION = 3  # since 3 with a checksum of the description
_LINEAGE = ("depth", "kind", "name", "hash", "available")
_log = logging.getLogger("ml_factory")


@dataclass(frozen=True)
class Artifact:
    """One registered state.

    Parameters
    ----------
    path : its folder.
    hash : SHA-256 of the state's bytes.
    sequence : order of registration within the symbol.
    facts : JSON-able description (horizon, model, settings, metrics).
    made_from : hashes of its sources: {"data": the prepared data's fingerprint, "run": the run's id, "models": {name:
        hash of the base artifact}}, those that apply.
    """

    path: Path
    hash: str
    symbol: str
    kind: str
    name: str
    sequence: int
    registered_at: str
    facts: dict = field(default_factory=dict)
    made_from: dict = field(default_factory=dict)

    def is_intact(self) -> bool:
        """Return True when the state's file exists and matches its hash."""
        try:
            return files.sha256(self.path / "state.safetensors") == self.hash
        except FileError:
            return False

    def load_state(self) -> dict:
        """Return the state, verified against its hash. Raises CheckpointError naming the file when it does not
        match.
        """
        file = self.path / "state.safetensors"
        data = files.read(file)
        if hashlib.sha256(data).hexdigest() != self.hash:
            raise CheckpointError(
                "This artifact is torn or was changed",
                where=file,
                got="another hash",
                wanted=self.hash[:12],
                next_step="train it again, or restore the file",
            )
        return deserialize_state(data)


class ArtifactRegistry:
    """The artifacts under one `models` folder."""

    def __init__(self, models_folder: str | os.PathLike):
        self.folder = Path(models_folder)

    def register(
        self, symbol: str, kind: str, name: str, state: dict, facts: dict | None = None, made_from: dict | None = None
    ) -> Artifact:
        """Store a finished state; equal content again takes a new sequence number, not new space.

        Parameters
        ----------
        symbol : as of `check_symbol`.
        kind : "model" or "stack".
        name : the model's name.
        state : as of `serialize_state`.
        facts : JSON-able, such as {"horizon": 20}.
        made_from : as of `Artifact`.

        Raises CheckpointError for a state that cannot be stored, WorkspaceError when the disk is full.
        """
        digest = hashlib.sha256(data := serialize_state(state)).hexdigest()
        description = {"facts": to_json_value(facts or {}), "made_from": to_json_value(made_from or {})}
        description |= {"symbol": check_symbol(symbol), "kind": kind, "name": name, "hash": digest}
        return self._store(data, **description)

    def import_artifact(self, folder: Path) -> Artifact:
        """Import a copy of an artifact: a folder with `state.safetensors` and `artifact.json`.

        Raises CheckpointError or WorkspaceError when the copy is not intact; nothing is imported then.
        """
        source = _artifact(Path(folder) / "artifact.json")
        source.load_state()
        data = files.read(Path(folder) / "state.safetensors")
        description = {
            name: value for name, value in _record(source).items() if name not in ("sequence", "registered_at")
        }
        return self._store(data, **description)

    def _store(self, data: bytes, **description) -> Artifact:
        """Write the state and, last, the description with the next sequence number."""
        symbol_folder = self.folder / description["symbol"]
        name = f"{description['kind']}-{description['name']}-{description['hash'][:12]}"
        path = stored_path(symbol_folder, name, inside=self.folder)
        with file_lock(symbol_folder / ".registry.lock"):
            files.write(path / "state.safetensors", data)
            sequence = 1 + max((there.sequence for there in self.list(description["symbol"])), default=0)
            artifact = Artifact(
                path=path, sequence=sequence, registered_at=datetime.now(UTC).isoformat(), **description
            )
            record = redact_values({"version": VERSION, **_record(artifact)})  # as `write_json` writes it
            files.write_json(path / "artifact.json", {**record, "checksum": fingerprint_json(record)})
        return artifact

    def list(self, symbol: str) -> list[Artifact]:
        """List every complete artifact of this symbol, oldest first. One that cannot be read costs a warning."""
        found, symbol_folder = [], self.folder / check_symbol(symbol)
        names = [name for name in files.names(symbol_folder) if not name.startswith(REMOVED)]
        for file in [symbol_folder / name / "artifact.json" for name in names]:
            try:
                if files.is_file(file):
                    found.append(_artifact(file, symbol))
            except FileError as error:
                _log.warning("An artifact is skipped: %s", error)
        return sorted(found, key=lambda one: (one.sequence, one.registered_at, one.hash))

    def remove(self, artifact: Artifact) -> bool:
        """Delete the artifact, unless it was registered again since it was listed; return whether it was deleted."""
        symbol_folder = self.folder / check_symbol(artifact.symbol)
        path = stored_path(symbol_folder, artifact.path.name, inside=self.folder)
        with file_lock(symbol_folder / ".registry.lock"):
            if _artifact(path / "artifact.json", artifact.symbol).sequence != artifact.sequence:
                return False
            files.remove_folder(path)
        return True

    def find(
        self, symbol: str, horizon: int | None = None, model: str | None = None, *, kind: str | None = None, **facts
    ) -> Artifact | None:
        """Return the newest artifact that matches everything given, or None.

        Parameters
        ----------
        model : the artifact's name.
        horizon, any other keyword : the fact of that name must equal the value.
        """
        wanted = facts if horizon is None else {"horizon": horizon, **facts}
        for artifact in reversed(self.list(symbol)):
            if (
                model in (None, artifact.name)
                and kind in (None, artifact.kind)
                and all(name in artifact.facts and artifact.facts[name] == value for name, value in wanted.items())
            ):
                return artifact
        return None

    def lineage(self, artifact: Artifact) -> tuple[dict, ...]:
        """List the artifact and its sources recursively, each source right below its artifact; a shared source is
        listed under each.

        Each has `depth`, 0 for the artifact itself; `kind`, that of an artifact, "run" or "data"; `name` of a model, or
        ""; `hash` of its content, or a run's id; `available`: True when the registry has it intact, False for a source
        that no longer exists, None for a run or data.
        """
        by_hash = {one.hash: one for one in self.list(artifact.symbol)}

        def walk(one: Artifact, depth: int, above: tuple[str, ...]) -> Iterator[tuple]:
            yield depth, one.kind, one.name, one.hash, one.is_intact()
            for kind in (kind for kind in ("run", "data") if kind in one.made_from):
                yield depth + 1, kind, "", str(one.made_from[kind]), None
            for name, digest in dict(one.made_from.get("models", {})).items():
                if digest in by_hash and digest not in above:  # a modified description may name itself
                    yield from walk(by_hash[digest], depth + 1, (*above, one.hash))
                else:
                    yield depth + 1, "model", name, str(digest), False

        return tuple(dict(zip(_LINEAGE, line, strict=True)) for line in walk(artifact, 0, ()))


def _record(artifact: Artifact) -> dict:
    return {name: value for name, value in vars(artifact).items() if name != "path"}


def _artifact(file: Path, symbol: str = "") -> Artifact:
    """Read an artifact's description. Raises FileError where it is damaged, or a name in it is not plain.

    symbol : that of the folder; "" for a copy elsewhere.
    """
    record = files.read_json(file)
    try:
        checksum, version = record.pop("checksum", None), record.pop("version")
        if version != VERSION:
            raise FileError("Another version of ml_factory registered this", where=file, got=f"version {version}",
                            wanted=VERSION, next_step="train it again")  # fmt: skip
        if checksum != fingerprint_json({"version": version, **record}):
            raise ValueError("it was changed: its checksum is another")
        artifact = Artifact(path=file.parent, **record)
        if check_symbol(artifact.symbol) != (symbol or artifact.symbol):
            raise ValueError(f"it is of {artifact.symbol}, not of {symbol}")
        names = (artifact.kind, artifact.name, artifact.registered_at, artifact.facts.get("run_id", "none"))
        if wrong := [name for name in names if not is_plain_name(name)]:
            raise ValueError(f"{str(wrong[0])[:80]!r} cannot be part of a folder's name")
        return artifact
    except FileError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise FileError("This is not an artifact's description", where=file, got=error) from error
