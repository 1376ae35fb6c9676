"""Calls of gcloud as child processes: argument lists without a shell, deadlines, kinds of failures, dry runs."""

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
from ml_factory.tpu.gcloud_commands import Command

_KINDS = (  # (kind, pattern of gcloud's message in small letters)
    ("quota", r"quota|exhausted"),
    ("missing", r"not_found|not found|\b404\b"),
    ("permission", r"permission_denied|permission denied \(|permission '|forbidden|\b403\b|does not have permission"),
    ("login", r"gcloud auth login|reauthentication|no active account|do not currently have an active account"),
    ("connection", r"timed out|connection refused|connection reset|port 22\b|exit code 255|unable to connect"),
)
_STEPS = {
    "quota": "request TPU quota for this type and zone at console.cloud.google.com/iam-admin/quotas, or another ZONE",
    "missing": "check PROJECT_ID, ZONE and the names",
    "permission": "give this account roles/tpu.admin, roles/storage.admin and roles/iam.serviceAccountUser",
    "login": "run: gcloud auth login",
    "connection": "run: python -m ml_factory tpu resume; where ssh is closed set ALLOW_SSH_FROM to your address range",
    "other": "read the message of gcloud, then run: python -m ml_factory tpu resume",
}


class GcloudError(FactoryError):
    """A call of gcloud that failed; kind: quota, missing, permission, login, connection or other."""

    def __init__(self, command: Command, message: str, kind: str):
        self.kind = kind
        reason = message[max(message.find("ERROR:"), 0) :].split()
        super().__init__(
            f"gcloud refused ({kind})",
            where=" ".join(command[:4]),
            got=" ".join(reason)[:400] or "no message",
            next_step=_STEPS[kind],
        )


class Gcloud:
    """The gcloud of the PATH.

    Parameters
    ----------
    dry_run : print each command and call nothing.
    seconds : longest time of one call; ssh_seconds: of one that copies to or runs on workers.
    tries, pause : calls over ssh, and seconds between two of them.
    """

    def __init__(
        self,
        *,
        dry_run: bool = False,
        seconds: float = 300.0,
        ssh_seconds: float = 1800.0,
        tries: int = 3,
        pause: float = 20.0,
        say: Callable[[str], None] = print,
    ):
        self.dry_run, self.seconds, self.ssh_seconds = dry_run, seconds, ssh_seconds
        self.tries, self.pause, self.say = tries, pause, say
        self.program = shutil.which("gcloud") or ""
        if not self.program and not dry_run:
            raise FactoryError(
                "gcloud is not installed",
                where="PATH",
                wanted="Google Cloud SDK",
                next_step="see cloud.google.com/sdk/docs/install, or print the commands with --dry-run",
            )

    def call(self, command: Command, content: str = "") -> str:
        """Run a command and return its output; content : for standard input. Raises GcloudError."""
        if self.dry_run:
            self.say(f"gcloud {shlex.join(command)}" + ("  # the key on standard input" if content else ""))
            return ""
        return self._call_once(command, content, self.seconds)

    def call_json(self, command: Command) -> dict[str, Any]:
        """Run a command that prints a JSON object and return it; {} in a dry run. Raises GcloudError."""
        text = self.call(command)
        if self.dry_run:
            return {}
        try:
            value = parse_json(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise GcloudError(command, f"the answer is no JSON object: {text[:100]!r}", "other")
        return value

    def call_workers(self, command: Command) -> str:
        """Run a command over ssh, again after a lost connection. Raises GcloudError."""
        if self.dry_run:
            return self.call(command)
        for left in reversed(range(self.tries)):
            try:
                return self._call_once(command, "", self.ssh_seconds)
            except GcloudError as error:
                if error.kind != "connection" or not left:
                    raise
                self.say(f"connection lost, {left} more tries: {' '.join(command[:4])}")
                time.sleep(self.pause)
        raise AssertionError("unreachable")

    def exists(self, command: Command) -> bool:
        """Return whether a describing command finds its object. Raises GcloudError for another failure."""
        try:
            self.call(command)
        except GcloudError as error:
            if error.kind == "missing":
                return False
            raise
        return not self.dry_run

    def open_terminal(self, command: Command) -> int:
        """Run a command on this terminal and return its exit code."""
        if self.dry_run:
            self.call(command)
            return 0
        return subprocess.run([self.program, *command]).returncode

    def _call_once(self, command: Command, content: str, seconds: float) -> str:
        try:
            done = subprocess.run(
                [self.program, *command],
                input=content,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise GcloudError(command, f"timed out after {seconds:g} s", "connection") from None
        except OSError as error:
            raise GcloudError(command, str(error), "other") from None
        if done.returncode:
            message = redact_secrets(done.stderr or done.stdout)
            raise GcloudError(command, message, _kind_of(message, done.returncode))
        return done.stdout


def _kind_of(message: str, code: int) -> str:
    """Return the kind of a failure by gcloud's message; warnings before the error, such as of quota projects, are not
    read.
    """
    text = message[max(message.find("ERROR:"), 0) :].lower()
    kind = next((kind for kind, pattern in _KINDS if re.search(pattern, text)), "other")
    return "connection" if kind == "other" and code == 255 else kind
