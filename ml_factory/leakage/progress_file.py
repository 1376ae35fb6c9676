"""What a proof that was killed had tried: kept step by step, each time whole, and worth nothing to any other proof."""

import json
from dataclasses import dataclass
from pathlib import Path

from ml_factory.storage.atomic_files import fingerprint, json_or_none, remove_file, replace_file, to_json_value


@dataclass(frozen=True)
class ProofProgress:
    """path : where it is kept.  proof : fingerprint of all that decides what the proof finds.

    horizons : proved at once: where only some of their certificates were written, the others need the same proof.
    """

    path: Path
    proof: str
    horizons: tuple[int, ...] = ()

    def load(self) -> dict | None:
        """What `save` was told last; None where nothing is kept of this proof, or not whole."""
        stored = _read(self.path)
        return stored["told"] if stored and stored["proof"] == self.proof else None

    def save(self, told: dict) -> None:
        """Keep this in the place of what was kept. Not flushed: what a power cut takes is tried again."""
        content = {"proof": self.proof, "horizons": list(self.horizons), "told": to_json_value(told)}
        text = json.dumps(content | {"hash": fingerprint(content)}, allow_nan=False)
        replace_file(self.path, lambda aside: aside.write_text(text, encoding="utf-8"), flush=False)

    def forget(self) -> None:
        """The proof is over."""
        remove_file(self.path)


def horizons_tried(path: Path) -> tuple[int, ...]:
    """The horizons of the proof that is kept there; none where there is none."""
    stored = _read(path)
    return tuple(stored["horizons"]) if stored else ()


def _read(path: Path) -> dict | None:
    """What is kept there, where it is whole. Raises UnresponsiveMountError."""
    stored = json_or_none(path)
    try:
        content = {name: stored[name] for name in ("proof", "horizons", "told")}
        return content if stored["hash"] == fingerprint(content) else None
    except (KeyError, TypeError):
        return None
