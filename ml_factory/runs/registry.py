"""Finished artifacts by content hash: what training leaves and what stacking, evaluation and prediction load.

    models/{SYMBOL}/{kind}-{name}-{hash12}/state.safetensors   the numbers
                                           artifact.json       hash, facts, sequence; written last

A folder without `artifact.json` is an interrupted registration and does not exist for `find`. The newest artifact is
the one with the highest sequence number; no time stamp of a file is ever asked.
"""

import hashlib
import logging
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.errors import CheckpointError, SettingsError, WorkspaceError
from ml_factory.runs.ownership import exclusive
from ml_factory.runs.state import decode_state, encode_state
from ml_factory.runs.storage import disk_errors, file_hash, plain, read_json, write_bytes_atomic, write_json
from ml_factory.runs.workspace import check_symbol

VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,63}")
_log = logging.getLogger("ml_factory")


@dataclass(frozen=True)
class Artifact:
    """One registered state.

    path : its folder.  hash : SHA-256 of the state's bytes.  sequence : order of registration within the symbol.
    facts : what it was made from and how it did (horizon, model, fingerprints, metrics).
    """

    path: Path
    hash: str
    symbol: str
    kind: str
    name: str
    sequence: int
    registered_at: str
    facts: dict = field(default_factory=dict)

    def whole(self) -> bool:
        """Whether the state is there with its hash. One that is not is made again by whoever can."""
        try:
            return file_hash(self.path / "state.safetensors") == self.hash
        except WorkspaceError:
            return False

    def load_state(self) -> dict:
        """The state, verified against its hash. Raises CheckpointError naming the file when it does not match."""
        file = self.path / "state.safetensors"
        with disk_errors(file):
            data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.hash:
            raise CheckpointError(
                "This artifact is torn or was changed",
                where=file,
                got="another hash",
                wanted=self.hash[:12],
                next_step="train it again, or restore the file",
            )
        return decode_state(data)


class Registry:
    """The artifacts under one `models` folder."""

    def __init__(self, models_folder: str | os.PathLike):
        self.folder = Path(models_folder)

    def register(self, symbol: str, kind: str, name: str, state: dict, facts: dict | None = None) -> Artifact:
        """Keep a finished state; the same content again takes a new sequence number, not new space.

        kind : "model", "stack", "bundle" …  name : the model's name.  facts : JSON-able, such as {"horizon": 20}.
        Raises CheckpointError for a state that cannot be kept, WorkspaceError when the disk is full.
        """
        for field_name, value in (("kind", kind), ("name", name)):
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                wanted = "letters, digits, '_' and '.'"
                raise SettingsError("An artifact's name becomes a folder", where=field_name, got=value, wanted=wanted)
        home = self.folder / check_symbol(symbol)
        data = encode_state(state)
        digest = hashlib.sha256(data).hexdigest()
        path = home / f"{kind}-{name}-{digest[:12]}"
        with exclusive(home / ".registry.lock"):
            write_bytes_atomic(path / "state.safetensors", data)
            artifact = Artifact(
                path=path,
                hash=digest,
                symbol=symbol,
                kind=kind,
                name=name,
                sequence=1 + max((one.sequence for one in self.list(symbol)), default=0),
                registered_at=datetime.now(UTC).isoformat(),
                facts=plain(facts or {}),
            )
            write_json(path / "artifact.json", {"version": VERSION, **_record(artifact)})
        return artifact

    def list(self, symbol: str) -> list[Artifact]:
        """Every complete artifact of this symbol, oldest first. One that cannot be read is named in the log."""
        found = []
        for file in sorted((self.folder / check_symbol(symbol)).glob("*/artifact.json")):
            try:
                found.append(_artifact(file))
            except WorkspaceError as error:
                _log.warning("An artifact is passed over: %s", error)
        return sorted(found, key=lambda one: (one.sequence, one.registered_at, one.hash))

    def find(
        self, symbol: str, horizon: int | None = None, model: str | None = None, *, kind: str | None = None, **facts
    ) -> Artifact | None:
        """The artifact registered last among those that match everything given, or None.

        model : its name.  horizon and any other keyword : the fact of that name must equal the value given.
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


def _record(artifact: Artifact) -> dict:
    return {name: value for name, value in vars(artifact).items() if name != "path"}


def _artifact(file: Path) -> Artifact:
    record = read_json(file)
    try:
        version = record.pop("version")
        if version > VERSION:
            raise WorkspaceError("A later version of ml_factory registered this", where=file, got=f"version {version}")
        artifact = Artifact(path=file.parent, **record)
        if type(artifact.sequence) is not int or not isinstance(artifact.facts, dict):
            raise TypeError("sequence is a number and facts are an object")
        return artifact
    except (TypeError, KeyError, AttributeError) as error:
        raise WorkspaceError("This is not an artifact's description", where=file, got=error) from error
