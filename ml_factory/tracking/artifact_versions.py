"""The versions that W&B has of one artifact: which is the newest, and which are taken away.

Every checkpoint sent is a new version of one name, and W&B keeps them all: at one every ten minutes a night's training
would be forty. Only the mirror's process asks here. A service that does not answer, or will not delete, costs space
there and nothing else, so what it refuses is left for the next time.
"""

import re

PROJECT = "ohlcv-ml-factory"
KEPT_VERSIONS = 2  # versions of a run's checkpoints at W&B, beside the one that is on its way
QUERY_SECONDS = 20
_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")


def wandb_name(text: str) -> str:
    """A name that W&B takes: of a run or of an artifact."""
    return _CHARACTERS.sub("-", text)[:120]


def artifact_name(kind: str, run_id: str) -> str:
    """The W&B artifact of what a run leaves: its "model" or "stack", or the "checkpoints" that it goes on from."""
    return wandb_name(f"{kind}-{run_id}")


class ArtifactVersions:
    """The versions of the artifact of this name and type.

    wandb : the module, or what stands in for it.
    """

    def __init__(self, wandb, kind: str, name: str):
        self._wandb, self._kind, self._name = wandb, kind, name

    def metadata(self) -> dict:
        """What the newest says of itself; {} where there is none, or nobody answers."""
        found = self._list()
        return dict(found[0].metadata or {}) if found else {}

    def delete_old(self, keep: int = KEPT_VERSIONS) -> int:
        """Delete all but the newest `keep`, and those that the user gave a name of their own; how many went."""
        gone = 0
        for version in self._list()[keep:]:
            own = set(version.aliases) - {"latest"}
            try:
                if not own:
                    version.delete(delete_aliases=keep == 0)
                    gone += 1
            except self._refusals():
                continue
        return gone

    def _list(self) -> list:
        """The newest first."""
        try:
            api = self._wandb.Api(overrides={"project": PROJECT}, timeout=QUERY_SECONDS)
            if not api.artifact_exists(f"{PROJECT}/{self._name}:latest"):
                return []
            found = list(api.artifacts(self._kind, f"{PROJECT}/{self._name}"))
        except self._refusals():
            return []
        return sorted(found, key=lambda one: int(one.version.removeprefix("v")), reverse=True)

    def _refusals(self) -> tuple[type[Exception], ...]:
        return self._wandb.Error, ValueError, RuntimeError, OSError
