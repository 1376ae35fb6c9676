"""Versions of an artifact at W&B: lookup of the newest, deletion of old ones.

Every upload of checkpoints is a new version of one name, and W&B keeps them all: at one every ten minutes a night's
training would leave forty. Only the mirror's process calls this. A service that does not answer, or refuses a deletion,
costs space there and has no other effect, so refused deletions are left for the next time.
"""

import re

PROJECT = "ohlcv-ml-factory"
KEPT_VERSIONS = 2  # versions of a run's checkpoints at W&B, in addition to the one being uploaded
QUERY_SECONDS = 20
_ILLEGAL_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def wandb_name(text: str) -> str:
    """Return the text as a legal W&B name of a run or an artifact."""
    return _ILLEGAL_CHARACTERS.sub("-", text)[:120]


def artifact_name(kind: str, run_id: str) -> str:
    """Return the W&B artifact name of a run's "model" or "stack", or of its "checkpoints"."""
    return wandb_name(f"{kind}-{run_id}")


class ArtifactVersions:
    """The versions of the artifact of this name and type.

    Parameters
    ----------
    wandb : the module, or a stand-in.
    kind : artifact type.
    name : artifact name.
    """

    def __init__(self, wandb, kind: str, name: str):
        self._wandb, self._kind, self._name = wandb, kind, name

    def metadata(self) -> dict:
        """Return the metadata of the newest version; {} without one, or without an answer."""
        found = self._list()
        return dict(found[0].metadata or {}) if found else {}

    def delete_old(self, keep: int = KEPT_VERSIONS) -> int:
        """Delete all but the newest `keep` versions and those with an alias of the user; return the number deleted."""
        deleted = 0
        for version in self._list()[keep:]:
            own = set(version.aliases) - {"latest"}
            try:
                if not own:
                    version.delete(delete_aliases=keep == 0)
                    deleted += 1
            except self._refusals():
                continue
        return deleted

    def _list(self) -> list:
        """List the versions, newest first."""
        try:
            api = self._wandb.Api(overrides={"project": PROJECT}, timeout=QUERY_SECONDS)
            if not api.artifact_exists(f"{PROJECT}/{self._name}:latest"):
                return []
            found = list(api.artifacts(self._kind, f"{PROJECT}/{self._name}"))
        except self._refusals():
            return []
        return sorted(found, key=lambda version: int(version.version.removeprefix("v")), reverse=True)

    def _refusals(self) -> tuple[type[Exception], ...]:
        return self._wandb.Error, ValueError, RuntimeError, OSError
