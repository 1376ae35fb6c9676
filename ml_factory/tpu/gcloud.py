"""Calls of gcloud as child processes: argument lists without a shell, deadlines, kinds of failures, dry runs.

Grammar: cloud.google.com/sdk/gcloud/reference (compute tpus, storage, secrets, services), SDK 528.0.0.
"""

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

from ml_factory.errors import FactoryError
from ml_factory.redaction import redact_secrets
from ml_factory.storage.json_values import parse_json

# kind -> (pattern of gcloud's message in small letters, next step)
_KINDS = {
    "quota": (
        r"quota|exhausted",
        "request TPU quota for this type and zone at console.cloud.google.com/iam-admin/quotas, or another ZONE",
    ),
    "missing": (r"not_found|not found|\b404\b", "check PROJECT_ID, ZONE and the names"),
    "permission": (
        r"permission_denied|permission denied \(|permission '|forbidden|\b403\b|does not have permission",
        "give this account roles/tpu.admin, roles/storage.admin and roles/iam.serviceAccountUser",
    ),
    "login": (
        r"gcloud auth login|reauthentication|no active account|do not currently have an active account",
        "run: gcloud auth login",
    ),
    "connection": (
        r"timed out|connection refused|connection reset|port 22\b|exit code 255|unable to connect",
        "run: python -m ml_factory tpu resume; where ssh is closed add a firewall rule for tcp:22",
    ),
    "other": ("", "read the message of gcloud, then run: python -m ml_factory tpu resume"),
}


SECONDS, SSH_SECONDS = 300.0, 1800.0  # longest time of one call, and of one that copies to or runs on workers
TRIES = 3  # of a call over ssh


class GcloudError(FactoryError):
    """A call of gcloud that failed; kind : quota, missing, permission, login, connection or other."""

    def __init__(self, words: tuple[str, ...], message: str, kind: str = ""):
        reason = message[
            max(message.find("ERROR:"), 0) :
        ]  # warnings before it, such as of quota projects, are no reason
        self.kind = kind or next(kind for kind, (pattern, _) in _KINDS.items() if re.search(pattern, reason.lower()))
        super().__init__(
            f"gcloud refused ({self.kind})", where=" ".join(words[:4]),
            got=" ".join(reason.split())[:400] or "no message", next_step=_KINDS[self.kind][1],
        )  # fmt: skip


class Gcloud:
    """The gcloud of the PATH.

    common : words at the end of each command.
    dry_run : print each command and call nothing.
    pause : seconds between two tries of a call over ssh.
    """

    def __init__(
        self, *common: str, dry_run: bool = False, pause: float = 20.0, say: Callable[[str], None] = print
    ):  # fmt: skip
        self.common, self.dry_run, self.pause, self.say = common, dry_run, pause, say
        self.program = shutil.which("gcloud") or ""
        if not self.program and not dry_run:
            raise FactoryError(
                "gcloud is not installed", where="PATH", wanted="Google Cloud SDK",
                next_step="see cloud.google.com/sdk/docs/install, or print the commands with --dry-run",
            )  # fmt: skip

    def call(self, *words: str, content: str = "", seconds: float = 0.0) -> str:
        """Run a command and return its output; content : for standard input. Raises GcloudError."""
        words = (*words, *self.common)
        if self.dry_run:
            self.say(f"gcloud {shlex.join(words)}" + ("  # the key on standard input" if content else ""))
            return ""
        try:
            done = subprocess.run([self.program, *words], input=content, capture_output=True, text=True,
                                  errors="replace", timeout=seconds or SECONDS)  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise GcloudError(words, f"timed out after {error.timeout:g} s", "connection") from None
        except OSError as error:
            raise GcloudError(words, str(error), "other") from None
        if done.returncode:
            message = redact_secrets(done.stderr or done.stdout)
            raise GcloudError(words, f"{message} exit code 255" if done.returncode == 255 else message)
        return done.stdout

    def describe(self, *words: str) -> dict[str, Any] | None:
        """Return what a describing command prints; None where there is no such thing, {} in a dry run.

        Raises GcloudError for another failure.
        """
        try:
            text = self.call(*words, "--format=json") or "{}"
            if isinstance(value := parse_json(text), dict):
                return value
        except GcloudError as error:
            if error.kind == "missing":
                return None
            raise
        except ValueError:
            pass
        raise GcloudError(words, f"the answer is no JSON object: {text[:100]!r}", "other")

    def call_workers(self, *words: str) -> str:
        """Run a command over ssh, again after a lost connection. Raises GcloudError."""
        for _ in range(TRIES - 1):
            try:
                return self.call(*words, seconds=SSH_SECONDS)
            except GcloudError as error:
                if error.kind != "connection":
                    raise
                self.say(f"connection lost, once more: {' '.join(words[:4])}")
                time.sleep(self.pause)
        return self.call(*words, seconds=SSH_SECONDS)

    def open_terminal(self, *words: str) -> int:
        """Run a command on this terminal and return its exit code."""
        if self.dry_run:
            self.call(*words)
            return 0
        return subprocess.run([self.program, *words, *self.common]).returncode
