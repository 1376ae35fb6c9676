"""Life of a slice: requested, waited for, prepared, launched, watched, requested again after a preemption, deleted."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ml_factory.tpu import gcloud_commands
from ml_factory.tpu.gcloud_process import Gcloud, GcloudError
from ml_factory.tpu.settings import SliceSettings
from ml_factory.tpu.slice_state import SliceState
from ml_factory.tpu.worker_files import find_config, pack_code, write_worker_files

# cloud.google.com/tpu/docs/queued-resources: states of a request
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
GONE = ("SUSPENDING", "SUSPENDED", "DELETING")
LOST_MACHINES = ("PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
FAILED_REQUESTS = ("REQUEST_FAILED", "QUOTA_REFUSED")  # phases in which a request may stay that has to be deleted


@dataclass(frozen=True)
class Patience:
    """Seconds of waiting.

    poll : between two looks at a state.
    longest : of one verb for a slice, or for a training that is watched; infinity without a limit.
    """

    poll: float = 30.0
    longest: float = float("inf")


class Slice:
    """One slice with its settings and its gcloud.

    folder : for the files that are copied to the workers.
    """

    def __init__(
        self,
        settings: SliceSettings,
        gcloud: Gcloud,
        folder: Path,
        patience: Patience = Patience(),
        say: Callable[[str], None] = print,
    ):
        self.settings, self.gcloud, self.folder, self.patience, self.say = settings, gcloud, folder, patience, say
        self.state, self.requests = SliceState(), 0  # requests of this command

    def setup(self, wait: bool = True) -> SliceState:
        """Make bucket, rule and secret where they are missing, request the slice, launch the training."""
        self.say(self.settings.accelerator.describe(self.settings.price))
        self._check_launch()
        self._make_surroundings()
        self._bring_up(wait)
        return self.state

    def resume(self, wait: bool = True) -> SliceState:
        """Continue where an interrupted setup or a preemption left off; nothing that is there is made again."""
        self._check_launch()
        self._bring_up(wait, again=True)
        return self.state

    def refresh(self) -> SliceState:
        """Look at the request, the machines and the training, and return the state."""
        self._look()
        return self.state

    def watch(self) -> SliceState:
        """Print the log of worker 0 until the training ends; request a preempted slice again. Raises GcloudError."""
        end, shown = time.monotonic() + self.patience.longest, ""
        while True:
            self._look()
            if self.state.phase == "PREEMPTED":
                self._bring_up(wait=True)
            if self.state.phase == "RUNNING":
                shown = self._show_new_lines(shown)
            if self.state.phase != "RUNNING" or time.monotonic() >= end or self.gcloud.dry_run:
                return self.state
            time.sleep(min(self.patience.poll, max(0.0, end - time.monotonic())))

    def logs(self, worker: int, lines: int = 100) -> str:
        """Return the last lines of a worker's log. Raises GcloudError."""
        return self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, f"log {lines:d}", str(worker)))

    def ssh(self, worker: int) -> int:
        """Open a terminal on a worker and return its exit code."""
        return self.gcloud.open_terminal(gcloud_commands.open_shell(self.settings, worker))

    def stop(self) -> SliceState:
        """Stop the training on all workers; it saves first. The slice stays."""
        self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "stop"))
        self._enter("STOPPED", "its checkpoints are in the bucket")
        return self.state

    def cleanup(self) -> SliceState:
        """Delete the slice, its request and its firewall rule; the bucket and the secret are kept."""
        self._delete_request()
        if self.settings["ALLOW_SSH_FROM"] and (
            self.gcloud.exists(gcloud_commands.describe_firewall(self.settings)) or self.gcloud.dry_run
        ):
            self.gcloud.call(gcloud_commands.delete_firewall(self.settings))
        self._enter("DELETED", f"kept: gs://{self.settings['BUCKET']}")
        return self.state

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

    def _enter(self, phase: str, detail: str = "") -> None:
        self.state = SliceState(phase, detail[:500])

    def _bring_up(self, wait: bool, again: bool = False) -> None:
        """Request, wait, prepare and launch, as far as each is missing; request a slice again that is taken away.

        again : also once after a request that failed.
        """
        end = time.monotonic() + self.patience.longest
        while not self._wait_for_slice(end if wait else 0.0):
            if self.state.phase in FAILED_REQUESTS and again:
                again = False
            elif self.state.phase != "PREEMPTED":
                return
            elif self.requests >= int(self.settings["REQUESTS"]):
                self._enter("PREEMPTED", f"{self.requests} requests were used, as REQUESTS has it")
                return
            self._delete_request()
        if self.state.phase in ("RUNNING", "FINISHED") and not self.gcloud.dry_run:
            return
        if self.state.phase == "TRAINING_FAILED":  # workers that still run would wait for those that failed
            self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "stop"))
        self._prepare()
        self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "start"))
        self._enter("RUNNING")

    def _wait_for_slice(self, end: float) -> bool:
        """Request the slice if there is no request; return whether it is there before `end` (monotonic seconds)."""
        while True:
            self._look()
            if self.state.phase == "NEW":
                self.gcloud.call(gcloud_commands.request_slice(self.settings))
                self.requests += 1
                if self.gcloud.dry_run:
                    return True
                continue
            if self.state.phase != "WAITING":
                return self.state.phase not in ("PREEMPTED", *FAILED_REQUESTS)
            if time.monotonic() >= end:
                return False
            self.say(self.state.describe(self.settings["TPU_NAME"]))
            time.sleep(min(self.patience.poll, max(0.0, end - time.monotonic())))

    def _look(self) -> None:
        """Ask for the request, its machines and the training."""
        try:
            found = self.gcloud.call_json(gcloud_commands.describe_request(self.settings))
        except GcloudError as error:
            if error.kind != "missing":
                raise
            self._enter("NEW", "there is no request")
            return
        if self.gcloud.dry_run:
            return
        state = found.get("state")
        name = str(state.get("state") if isinstance(state, dict) else state)
        if name in WAITING:
            self._enter("WAITING", name)
        elif name == "FAILED":
            reason = _failure_text(state)
            self._enter("QUOTA_REFUSED" if "quota" in reason.lower() else "REQUEST_FAILED", reason)
        elif name in GONE:
            self._enter("PREEMPTED", f"the request is {name}")
        elif name != "ACTIVE":
            raise GcloudError(gcloud_commands.describe_request(self.settings), f"unknown state: {name[:60]}", "other")
        else:
            self._look_at_machines()

    def _look_at_machines(self) -> None:
        try:
            machine = str(self.gcloud.call_json(gcloud_commands.describe_slice(self.settings)).get("state"))
        except GcloudError as error:
            if error.kind != "missing":
                raise
            machine = "PREEMPTED"
        if machine in LOST_MACHINES:
            self._enter("PREEMPTED", f"the machines are {machine}")
        else:
            self._look_at_training()

    def _look_at_training(self) -> None:
        try:
            text = self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, "state"))
        except GcloudError as error:
            if error.kind in ("connection", "missing", "quota", "login", "permission"):
                raise
            self._enter("ACTIVE", "the workers have no script yet")
            return
        ends = [
            line.removeprefix("ML_FACTORY_WORKER ")
            for line in text.splitlines()
            if line.startswith("ML_FACTORY_WORKER ")
        ]
        bad = [end for end in ends if end == "died" or (end.startswith("ended ") and end != "ended 0")]
        if bad:
            self._enter("TRAINING_FAILED", f"{len(bad)} of {len(ends)} workers: {bad[0]}")
        elif ends and len(ends) != (workers := self.settings.accelerator.workers):
            self._enter("UNREACHABLE", f"{len(ends)} of {workers} workers answered")
        elif ends and all(end == "ended 0" for end in ends):
            self._enter("FINISHED")
        elif "running" in ends:
            self._enter("RUNNING", f"{len(ends)} workers")
        else:
            self._enter("READY", "no worker trains")

    def _prepare(self) -> None:
        paths = write_worker_files(self.settings, self.folder)
        self.gcloud.call_workers(gcloud_commands.copy_to_workers(self.settings, [str(path) for path in paths]))
        for action in ("unpack", "install"):
            self.gcloud.call_workers(gcloud_commands.run_on_workers(self.settings, action))
        self._enter("READY")

    def _delete_request(self) -> None:
        try:
            self.gcloud.call(gcloud_commands.delete_request(self.settings))
        except GcloudError as error:
            if error.kind != "missing":
                raise
        self._enter("NEW", "the request is deleted")

    def _show_new_lines(self, shown: str) -> str:
        text = self.logs(0)
        old, new = shown.splitlines(), text.splitlines()
        seen = next((count for count in range(min(len(old), len(new)), 0, -1) if old[-count:] == new[:count]), 0)
        for line in new[seen:]:
            self.say(line)
        return text


def _failure_text(state: object) -> str:
    data = state.get("failedData") if isinstance(state, dict) else None
    error = data.get("error") if isinstance(data, dict) else None
    return str(error.get("message", "no reason given") if isinstance(error, dict) else "no reason given")
