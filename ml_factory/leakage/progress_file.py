"""Saved progress of a proof: one file, replaced after each step, valid for this very proof only."""

import json
from dataclasses import dataclass
from pathlib import Path

from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json, to_json_value


@dataclass(frozen=True)
class ProofProgressFile:
    """Progress of one proof on disk.

    path : the file
    proof : fingerprint of all inputs that decide the result of the proof
    horizons : proved together: where only some of their certificates were written, the others need the same proof
    """

    path: Path
    proof: str
    horizons: tuple[int, ...] = ()

    def load(self) -> dict | None:
        """Return the last saved record; None where there is none of this proof, or it is damaged."""
        stored = _read(self.path)
        return stored["record"] if stored and stored["proof"] == self.proof else None

    def save(self, record: dict) -> None:
        """Replace the saved record. Not flushed: a step lost in a power cut is repeated."""
        content = {"proof": self.proof, "horizons": list(self.horizons), "record": to_json_value(record)}
        text = json.dumps(content | {"hash": fingerprint_json(content)}, allow_nan=False)
        files.replace(self.path, lambda temporary: temporary.write_text(text, encoding="utf-8"), flush=False)

    def forget(self) -> None:
        """Remove the file once the proof is complete."""
        files.remove(self.path)


def unfinished_proof_horizons(path: Path) -> tuple[int, ...]:
    """Return the horizons of the saved proof; () where there is none."""
    stored = _read(path)
    return tuple(stored["horizons"]) if stored else ()


def _read(path: Path) -> dict | None:
    """Read the file where it is valid, else None."""
    stored = files.read_json_or_none(path)
    try:
        content = {name: stored[name] for name in ("proof", "horizons", "record")}
        whole = isinstance(content["record"], dict) and all(type(one) is int for one in content["horizons"])
        return content if whole and stored["hash"] == fingerprint_json(content) else None
    except (KeyError, TypeError):
        return None
