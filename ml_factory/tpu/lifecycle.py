"""Life of a slice: requested, waited for, prepared, launched, watched, requested again after a preemption, deleted."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from ml_factory.errors import FactoryError
from ml_factory.tpu import gcloud_commands
from ml_factory.tpu.gcloud_process import Gcloud, GcloudError
from ml_factory.tpu.settings import SliceSettings
from ml_factory.tpu.slice_state import SliceState, StateFile
from ml_factory.tpu.worker_files import find_config, pack_code, write_worker_files

# cloud.google.com/tpu/docs/queued-resources: states of a request
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
GONE = ("SUSPENDING", "SUSPENDED", "DELETING")
LOST_MACHINES = ("PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
FAILED_REQUESTS = ("REQUEST_FAILED", "QUOTA_REFUSED")  # phases in which a request may stay that has to be deleted
_PHASE_OF_KIND = {"quota": "QUOTA_REFUSED", "connection": "UNREACHABLE"}


@dataclass(frozen=True)
class Patience:
    """Seconds of waiting.

    poll : between two looks at a state.
    longest : of one verb for a slice, or for a training that is watched; infinity without a limit.
    """

    poll: float = 30.0
    longest: float = float("inf")


class Slice:
    """One slice with its settings, its gcloud and its state file."""

    def __init__(
        self,
        settings: SliceSettings,
        gcloud: Gcloud,
        file: StateFile,
        patience: Patience = Patience(),
        say: Callable[[str], None] = print,
    ):
        self.settings, self.gcloud, self.file, self.patience, self.say = settings, gcloud, file, patience, say

    def setup(self, wait: bool = True) -> SliceState:
        """Make bucket, rule and secret where they are missing, request the slice, launch the training."""
        self.file.read()
        with self._failures():
            self.say(self.settings.accelerator.describe(self.settings.price))
            self._check_launch()
            self._make_surroundings()
            self._bring_up(wait)
        return self.file.state

    def resume(self, wait: bool = True) -> SliceState:
        """Continue where an interrupted setup or a preemption left off; nothing that is there is made again."""
        self.file.read()
        with self._failures():
            self._check_launch()
            if self.file.state.phase in FAILED_REQUESTS and not self.gcloud.dry_run:
                self._delete_request()
            self._bring_up(wait)
        return self.file.state

    def refresh(self) -> SliceState:
        """Look at the request, the machines and the training, and return the state."""
        self.file.read()
        with self._failures():
            self._look()
        return self.file.state

    def watch(self) -> SliceState:
        """Print the log of worker 0 until the training ends; request a preempted slice again. Raises GcloudError."""
        self.file.read()
        end, shown = time.monotonic() + self.patience.longest, ""
        while True:
            with self._failures():
                self._look()
                if self.file.state.phase == "PREEMPTED":
                    self._bring_up(wait=True)
                if self.file.state.phase == "RUNNING":
                    shown = self._show_new_lines(shown)
            if self.file.state.phase != "RUNNING" or time.monotonic() >= end or self.gcloud.dry_run:
                return self.file.state
            time.sleep(min(self.patience.poll, max(0.0, end - time.monotonic())))

    def logs(self, worker: int, lines: int = 100) -> str:
        """Return the last lines of a worker's log. Raises GcloudError."""
        return self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, f"log {lines:d}", str(worker)))

    def ssh(self, worker: int) -> int:
        """Open a terminal on a worker and return its exit code."""
        return self.gcloud.open_terminal(gcloud_commands.open_shell(self.settings, worker))

    def stop(self) -> SliceState:
        """Stop the training on all workers; it saves first. The slice stays."""
        self.file.read()
        with self._failures():
            self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "stop"))
            self.file.enter("STOPPED", "its checkpoints are in the bucket")
        return self.file.state

    def cleanup(self) -> SliceState:
        """Delete the slice, its request and its firewall rule; the bucket and the secret are kept."""
        self.file.read()
        with self._failures():
            self._delete_request()
            if self.settings["ALLOW_SSH_FROM"] and (
                self.gcloud.exists(gcloud_commands.describe_firewall(self.settings)) or self.gcloud.dry_run
            ):
                self.gcloud.call(gcloud_commands.delete_firewall(self.settings))
            self.file.enter("DELETED", f"kept: gs://{self.settings['BUCKET']}", requests=0)
        return self.file.state

    def objects_to_delete(self) -> list[str]:
        """Return what `cleanup` deletes, by name."""
        rule = [f"firewall rule {self.settings['TPU_NAME']}-allow-ssh"] if self.settings["ALLOW_SSH_FROM"] else []
        place = f"{self.settings['PROJECT_ID']}, {self.settings['ZONE']}"
        return [f"TPU {self.settings['TPU_NAME']} ({place})", f"queued resource {self.settings.request}", *rule]

    # ------------------------------------------------------------------ steps

    def _check_launch(self) -> None:
        """Say what the workers will run, and refuse what they could not before anything costs."""
        pack_code(self.settings)
        self.say(f"COMMAND: {self.settings['COMMAND']}")
        self.say(f"CONFIG: {find_config(self.settings) or 'none'}")

    def _make_surroundings(self) -> None:
        settings, call, exists = self.settings, self.gcloud.call, self.gcloud.exists
        call(gcloud_commands.enable_services(settings))
        if not exists(gcloud_commands.describe_bucket(settings)):
            call(gcloud_commands.create_bucket(settings))
        if settings["ALLOW_SSH_FROM"] and not exists(gcloud_commands.describe_firewall(settings)):
            call(gcloud_commands.create_firewall(settings))
        if settings.is_on("CONFIG_SSH"):
            call(gcloud_commands.config_ssh(settings))
        if settings.key:
            known = exists(gcloud_commands.describe_secret(settings))
            command = gcloud_commands.add_secret_version if known else gcloud_commands.create_secret
            call(command(settings), settings.key)

    def _bring_up(self, wait: bool) -> None:
        """Request, wait, prepare and launch, as far as each is missing; request a slice again that is taken away."""
        end = time.monotonic() + self.patience.longest
        while not self._wait_for_slice(end if wait else 0.0):
            if self.file.state.phase != "PREEMPTED":
                return
            if self.file.state.requests >= int(self.settings["REQUESTS"]):
                self.file.enter("PREEMPTED", f"{self.file.state.requests} requests were used, as REQUESTS has it")
                return
            self._delete_request()
        if self.file.state.phase in ("RUNNING", "FINISHED") and not self.gcloud.dry_run:
            return
        if self.file.state.phase == "TRAINING_FAILED":  # workers that still run would wait for those that failed
            self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "stop"))
        self._prepare()
        self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "start"))
        self.file.enter("RUNNING")

    def _wait_for_slice(self, end: float) -> bool:
        """Request the slice if there is no request; return whether it is there before `end` (monotonic seconds)."""
        while True:
            self._look(training=False)
            phase = self.file.state.phase
            if phase in ("NEW", "DELETED") or self.gcloud.dry_run:
                self.gcloud.call(gcloud_commands.request_slice(self.settings))
                self.file.enter("WAITING", requests=self.file.state.requests + 1)
                if self.gcloud.dry_run:
                    return True
                continue
            if phase != "WAITING":
                if phase not in ("PREEMPTED", *FAILED_REQUESTS):
                    self._look()
                return self.file.state.phase not in ("PREEMPTED", *FAILED_REQUESTS)
            if time.monotonic() >= end:
                return False
            self.say(self.file.state.describe(self.settings["TPU_NAME"]))
            time.sleep(min(self.patience.poll, max(0.0, end - time.monotonic())))

    def _look(self, training: bool = True) -> None:
        """Bring the phase up to date with the request, its machines and, where requested, the training."""
        try:
            found = self.gcloud.call_json(gcloud_commands.describe_request(self.settings))
        except GcloudError as error:
            if error.kind != "missing":
                raise
            self.file.enter("DELETED" if self.file.state.phase == "DELETED" else "NEW", "there is no request")
            return
        if self.gcloud.dry_run:
            return
        state = found.get("state")
        name = str(state.get("state") if isinstance(state, dict) else state)
        if name in WAITING:
            self.file.enter("WAITING", name)
        elif name == "FAILED":
            reason = _failure_text(state)
            self.file.enter("QUOTA_REFUSED" if "quota" in reason.lower() else "REQUEST_FAILED", reason)
        elif name in GONE:
            self.file.enter("PREEMPTED", f"the request is {name}")
        elif name != "ACTIVE":
            raise GcloudError(gcloud_commands.describe_request(self.settings), f"unknown state: {name[:60]}", "other")
        else:
            self._look_at_machines(training)

    def _look_at_machines(self, training: bool) -> None:
        try:
            machine = str(self.gcloud.call_json(gcloud_commands.describe_slice(self.settings)).get("state"))
        except GcloudError as error:
            if error.kind != "missing":
                raise
            machine = "PREEMPTED"
        if machine in LOST_MACHINES:
            self.file.enter("PREEMPTED", f"the machines are {machine}")
        elif not training:
            if self.file.state.phase in ("NEW", "WAITING", "PREEMPTED", "DELETED", "REQUEST_FAILED", "QUOTA_REFUSED"):
                self.file.enter("ACTIVE")
        elif self.file.state.phase not in ("NEW", "WAITING", "PREEMPTED", "QUOTA_REFUSED"):
            self._look_at_training()
        else:
            self.file.enter("ACTIVE")

    def _look_at_training(self) -> None:
        if self.file.state.phase in ("ACTIVE", "STOPPED"):
            return
        try:
            text = self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "state"))
        except GcloudError as error:
            if error.kind in ("connection", "missing", "quota", "login", "permission"):
                raise
            self.file.enter("ACTIVE", "the workers have no script yet")
            return
        ends = [
            line.removeprefix("ML_FACTORY_WORKER ")
            for line in text.splitlines()
            if line.startswith("ML_FACTORY_WORKER ")
        ]
        bad = [end for end in ends if end == "died" or (end.startswith("ended ") and end != "ended 0")]
        if bad:
            self.file.enter("TRAINING_FAILED", f"{len(bad)} of {len(ends)} workers: {bad[0]}")
        elif ends and len(ends) != (workers := self.settings.accelerator.workers):
            self.file.enter("UNREACHABLE", f"{len(ends)} of {workers} workers answered")
        elif ends and all(end == "ended 0" for end in ends):
            self.file.enter("FINISHED")
        elif "running" in ends:
            self.file.enter("RUNNING", f"{len(ends)} workers")
        else:
            self.file.enter("READY", "no worker trains")

    def _prepare(self) -> None:
        paths = write_worker_files(self.settings, self.file.path.with_suffix(""))
        self.gcloud.call_workers(gcloud_commands.copy_to_workers(self.settings, [str(path) for path in paths]))
        for action in ("unpack", "install"):
            self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, action))
        self.file.enter("READY")

    def _delete_request(self) -> None:
        try:
            self.gcloud.call(gcloud_commands.delete_request(self.settings))
        except GcloudError as error:
            if error.kind != "missing":
                raise
        self.file.enter("NEW", "the request is deleted")

    def _show_new_lines(self, shown: str) -> str:
        text = self.logs(0)
        old, new = shown.splitlines(), text.splitlines()
        seen = next((count for count in range(min(len(old), len(new)), 0, -1) if old[-count:] == new[:count]), 0)
        for line in new[seen:]:
            self.say(line)
        return text

    def _failures(self) -> "_Failures":
        return _Failures(self)


class _Failures:
    """Write the phase of a failed call of gcloud into the state before the error is passed on."""

    def __init__(self, slice_: Slice):
        self.slice = slice_

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GcloudError):
            self.slice.file.enter(_PHASE_OF_KIND.get(error.kind, "ERROR"), str(error.got))
        elif isinstance(error, FactoryError):
            self.slice.file.enter("ERROR", error.what)


def _failure_text(state: object) -> str:
    data = state.get("failedData") if isinstance(state, dict) else None
    error = data.get("error") if isinstance(data, dict) else None
    return str(error.get("message", "no reason given") if isinstance(error, dict) else "no reason given")
