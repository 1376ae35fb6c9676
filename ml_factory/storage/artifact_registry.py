"""Finished artifacts by content hash: what training leaves and what stacking, evaluation and prediction load.

    models/{SYMBOL}/{kind}-{name}-{hash12}/state.safetensors   the numbers
                                           artifact.json       hash, facts, sequence; written last

A folder without `artifact.json` is an interrupted registration and does not exist for `find`. The newest artifact is
the one with the highest sequence number; no time stamp of a file is ever asked. Each names the hashes of what it was
made from: `Registry.lineage` walks from a stack over its models to their runs and data.
"""

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from ml_factory.errors import CheckpointError, FactoryError, SettingsError, WorkspaceError
from ml_factory.storage.atomic_files import (
    cache_folder,
    file_hash,
    fingerprint,
    is_file,
    is_folder,
    names_in,
    read_file,
    read_json,
    to_json_value,
    write_bytes_atomic,
    write_json,
)
from ml_factory.storage.file_access import UnresponsiveMountError
from ml_factory.storage.locks import file_lock
from ml_factory.storage.mount_table import on_mount
from ml_factory.storage.pending_uploads import clear_pending, mark_pending
from ml_factory.storage.state import decode_state, encode_state
from ml_factory.storage.workspace import check_symbol

VERSION = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]{0,63}")
RETRY_SECONDS = 60.0  # until a workspace that refused an artifact is asked to take it again
_log = logging.getLogger("ml_factory")
_next_try: dict[Path, float] = {}


@dataclass(frozen=True)
class Artifact:
    """One registered state.

    path : its folder.  hash : SHA-256 of the state's bytes.  sequence : order of registration within the symbol.
    facts : what is told of it (horizon, model, settings, metrics).
    made_from : the hashes of what it was made from: {"data": the prepared data's fingerprint, "run": the run's id,
    "models": {name: hash of the artifact it stands on}}, those that apply.
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

    def whole(self) -> bool:
        """Whether the state is there with its hash. One that is not is made again by whoever can.

        Raises UnresponsiveMountError: what a mount does not tell is not lost.
        """
        try:
            return file_hash(self.path / "state.safetensors") == self.hash
        except UnresponsiveMountError:
            raise
        except WorkspaceError:
            return False

    def load_state(self) -> dict:
        """The state, verified against its hash. Raises CheckpointError naming the file when it does not match."""
        file = self.path / "state.safetensors"
        data = read_file(file)
        if hashlib.sha256(data).hexdigest() != self.hash:
            raise CheckpointError(
                "This artifact is torn or was changed",
                where=file,
                got="another hash",
                wanted=self.hash[:12],
                next_step="train it again, or restore the file",
            )
        return decode_state(data)


@dataclass(frozen=True)
class LineageEntry:
    """One line of a lineage.

    depth : 0 for the artifact itself, 1 for what it was made from.  kind : that of an artifact, "run" or "data".
    name : of a model, or "".  hash : of its content; a run's id.  here : whether the registry has it whole; None for
    what lies elsewhere.
    """

    depth: int
    kind: str
    name: str
    hash: str
    here: bool | None = None


class Registry:
    """The artifacts under one `models` folder."""

    def __init__(self, models_folder: str | os.PathLike):
        self.folder = Path(models_folder)

    @property
    def local_fallback(self) -> "Registry":
        """On this machine's disk: what a mount did not take, until it does."""
        return Registry(cache_folder("models") / fingerprint(os.path.abspath(self.folder))[:12])

    def is_persisted(self, artifact: Artifact) -> bool:
        """Whether the artifact is in the workspace, and not on this machine's disk alone."""
        return artifact.path.is_relative_to(self.folder)

    def register(
        self, symbol: str, kind: str, name: str, state: dict, facts: dict | None = None, made_from: dict | None = None
    ) -> Artifact:
        """Keep a finished state; the same content again takes a new sequence number, not new space.

        kind : "model", "stack", "bundle" …  name : the model's name.  facts : JSON-able, such as {"horizon": 20}.
        made_from : as of `Artifact`.
        What a mount does not take is kept on this machine's disk, which one line tells, and taken there by whoever
        looks for artifacts when it answers again.
        Raises CheckpointError for a state that cannot be kept, WorkspaceError when the disk is full.
        """
        for field_name, value in (("kind", kind), ("name", name)):
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                wanted = "letters, digits, '_' and '.'"
                raise SettingsError("An artifact's name becomes a folder", where=field_name, got=value, wanted=wanted)
        digest = hashlib.sha256(data := encode_state(state)).hexdigest()
        told = {"facts": to_json_value(facts or {}), "made_from": to_json_value(made_from or {})}
        told |= {"symbol": check_symbol(symbol), "kind": kind, "name": name, "hash": digest}
        try:
            return self._keep(data, **told)
        except WorkspaceError as error:
            if not on_mount(self.folder):
                raise
            kept = self.local_fallback._keep(data, **told)
            mark_pending((str(self.folder), digest), f"{name} of {symbol}")
            _log.warning(
                "%s of %s is kept on this machine's disk for now (%s), and goes to the workspace when that takes it: "
                "%s", name, symbol, kept.path, error,
            )  # fmt: skip
            return kept

    def import_artifact(self, folder: Path) -> Artifact:
        """Take in a copy of an artifact from elsewhere, as `state.safetensors` and `artifact.json` in a folder.

        Raises CheckpointError or WorkspaceError when it is not whole; nothing is taken in then.
        """
        there = _artifact(Path(folder) / "artifact.json")
        there.load_state()
        if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in (there.kind, there.name)):
            raise CheckpointError("This artifact's name cannot be a folder", where=folder, got=there.name)
        data = read_file(Path(folder) / "state.safetensors")
        kept = {name: value for name, value in _record(there).items() if name not in ("sequence", "registered_at")}
        return self._keep(data, **{**kept, "symbol": check_symbol(there.symbol)})

    def _keep(self, data: bytes, **told) -> Artifact:
        """Write it, the description last, with the next sequence number."""
        home = self.folder / told["symbol"]
        path = home / f"{told['kind']}-{told['name']}-{told['hash'][:12]}"
        with file_lock(home / ".registry.lock"):
            self._write_state(path / "state.safetensors", data, told["hash"])
            sequence = 1 + max((one.sequence for one in self._there(told["symbol"])), default=0)
            artifact = Artifact(path=path, sequence=sequence, registered_at=datetime.now(UTC).isoformat(), **told)
            write_json(path / "artifact.json", {"version": VERSION, **_record(artifact)})
        return artifact

    def _write_state(self, file: Path, data: bytes, wanted: str) -> None:
        """Write it and read it back: the checkpoints behind an artifact are given up once it is registered."""
        for _ in range(2):
            write_bytes_atomic(file, data)
            if is_file(file) and file_hash(file, remembered=False) == wanted:
                return
        raise WorkspaceError(
            "This folder did not keep what was written to it, twice", where=file,
            next_step="mount it again and run again: training goes on from its last checkpoint",
        )  # fmt: skip

    def list(self, symbol: str) -> list[Artifact]:
        """Every complete artifact of this symbol, oldest first. One that cannot be read is named in the log.

        What lies aside is taken to the workspace first, as far as that takes it; the rest is the newest. What was
        refused is tried again after RETRY_SECONDS.
        Raises UnresponsiveMountError where the folder is on a mount that does not answer: that is not an empty one.
        """
        left = self._carry(symbol) if on_mount(self.folder) else []
        found = self._there(symbol)
        last = max((one.sequence for one in found), default=0)
        return found + [replace(one, sequence=last + number) for number, one in enumerate(left, start=1)]

    def _carry(self, symbol: str) -> "list[Artifact]":
        """Take what lies aside to where it belongs; what was not taken, oldest first."""
        left, home = [], self.local_fallback.folder / check_symbol(symbol)
        if not is_folder(home):
            return left
        if time.monotonic() < _next_try.get(home, 0.0):
            return self.local_fallback._there(symbol)
        with file_lock(home / ".carry.lock"):
            for artifact in self.local_fallback._there(symbol):
                try:
                    self.import_artifact(artifact.path)
                    shutil.rmtree(artifact.path, ignore_errors=True)
                    clear_pending((str(self.folder), artifact.hash))
                    _log.warning(
                        "%s of %s, kept on this machine's disk, is in the workspace now", artifact.name, symbol
                    )
                except UnresponsiveMountError:
                    raise
                except FactoryError as error:
                    left.append(artifact)
                    _next_try[home] = time.monotonic() + RETRY_SECONDS
                    _log.warning("%s of %s stays on this machine's disk: %s", artifact.name, symbol, error)
        return left

    def _there(self, symbol: str) -> "list[Artifact]":
        """Those in the folder itself, oldest first."""
        found, home = [], self.folder / check_symbol(symbol)
        for file in [home / name / "artifact.json" for name in names_in(home)]:
            try:
                if is_file(file):
                    found.append(_artifact(file))
            except UnresponsiveMountError:
                raise
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

    def lineage(self, artifact: Artifact) -> tuple[LineageEntry, ...]:
        """The artifact and everything it was made from, each right below what was made from it; a thing that several
        were made from stands below each. One that is no longer here is listed with its hash and `here` False."""
        by_hash = {one.hash: one for one in self.list(artifact.symbol)}
        return tuple(_walk(artifact, by_hash, 0, ()))


def _walk(
    artifact: Artifact, by_hash: dict[str, Artifact], depth: int, above: tuple[str, ...]
) -> Iterator[LineageEntry]:
    yield LineageEntry(depth, artifact.kind, artifact.name, artifact.hash, artifact.whole())
    made_from = artifact.made_from
    for kind in ("run", "data"):
        if kind in made_from:
            yield LineageEntry(depth + 1, kind, "", str(made_from[kind]))
    for name, digest in dict(made_from.get("models", {})).items():
        if digest in by_hash and digest not in above:  # a description that was tampered with may name itself
            yield from _walk(by_hash[digest], by_hash, depth + 1, (*above, artifact.hash))
        else:
            yield LineageEntry(depth + 1, "model", name, str(digest), False)


def _first_version(facts: dict) -> dict:
    """What an artifact was made from, as far as its facts say: `made_from` came with version 2."""
    run = facts.get("run")
    settings = run.get("settings", {}) if isinstance(run, dict) else {}
    models = dict(zip(settings.get("base_models", ()), settings.get("bases", ()), strict=False))
    told = {"run": facts.get("run_id"), "data": facts.get("data"), "models": models}
    return {name: value for name, value in told.items() if value}


def _record(artifact: Artifact) -> dict:
    return {name: value for name, value in vars(artifact).items() if name != "path"}


def _artifact(file: Path) -> Artifact:
    record = read_json(file)
    try:
        version = record.pop("version")
        if version > VERSION:
            raise WorkspaceError("A later version of ml_factory registered this", where=file, got=f"version {version}")
        artifact = Artifact(path=file.parent, **record)
        if type(artifact.sequence) is not int or not all(
            isinstance(told, dict) for told in (artifact.facts, artifact.made_from)
        ):
            raise TypeError("sequence is a number, facts and made_from are objects")
        return artifact if artifact.made_from else replace(artifact, made_from=_first_version(artifact.facts))
    except (TypeError, KeyError, AttributeError) as error:
        raise WorkspaceError("This is not an artifact's description", where=file, got=error) from error
