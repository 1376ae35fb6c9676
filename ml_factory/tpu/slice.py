"""Life of a slice: requested, waited for, prepared, launched, watched, requested again after a preemption, deleted.

Each verb asks gcloud and the workers, and acts on the answer; nothing is kept of it here.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ml_factory.tpu.gcloud import Gcloud, GcloudError
from ml_factory.tpu.settings import SliceSettings
from ml_factory.tpu.worker_files import find_config, pack_code, write_worker_files

FOLDER = "ml_factory_tpu"  # in the home folder of each worker
SERVICES = ("compute.googleapis.com", "tpu.googleapis.com", "storage.googleapis.com")
# cloud.google.com/tpu/docs/queued-resources: states of a request, and of machines
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
GONE = ("SUSPENDING", "SUSPENDED", "DELETING")
LOST_MACHINES = ("PREEMPTED", "TERMINATED", "STOPPED", "DELETING", "deleted")
# phase -> what it means, and the next verb
PHASES = {
    "NEW": ("nothing is requested", "setup"), "WAITING": ("the request waits for a free slice", "resume"),
    "ACTIVE": ("the slice is there; its workers are not ready", "resume"),
    "READY": ("the workers have code and packages", "resume"), "RUNNING": ("the training runs", "monitor"),
    "FINISHED": ("the training ended well on all workers", "cleanup"),
    "TRAINING_FAILED": ("the training failed", "logs"),
    "STOPPED": ("the training was stopped; the slice is there and costs", "resume or cleanup"),
    "PREEMPTED": ("the slice was taken away", "resume"), "REQUEST_FAILED": ("the request failed", "resume or cleanup"),
    "UNREACHABLE": ("workers cannot be reached over ssh", "resume"),
    "DELETED": ("the slice is deleted; the bucket is kept", "setup"),
}  # fmt: skip


@dataclass(frozen=True)
class SliceState:
    """State of one slice. phase : one of PHASES. detail : message of the last step, one line."""

    phase: str = "NEW"
    detail: str = ""

    def describe(self, name: str) -> str:
        """Return one line: the phase, its meaning, the detail and the next command."""
        (meaning, verb), detail = PHASES[self.phase], f" ({self.detail})" if self.detail else ""
        return f"{name}: {self.phase}, {meaning}{detail}; next: python -m ml_factory tpu {verb}"


class Slice:
    """One slice with its settings and its gcloud.

    folder : for the files that are copied to the workers.
    poll : seconds between two looks at a state.
    """

    def __init__(
        self, settings: SliceSettings, gcloud: Gcloud, folder: Path, poll: float = 30.0,
        say: Callable[[str], None] = print,
    ):  # fmt: skip
        self.settings, self.gcloud, self.folder, self.say = settings, gcloud, folder, say
        self.poll, self.requests = poll, 0  # requests of this command
        self._bucket = f"gs://{settings['BUCKET']}"
        self._request = f"{settings['TPU_NAME']}-qr"  # the queued resource, as in the guide

    def setup(self, wait: bool = True) -> SliceState:
        """Make bucket and secret where they are missing, request the slice, launch the training."""
        kind, chips, workers = self.settings["ACCELERATOR_TYPE"], self.settings.chips, self.settings.workers
        self.say(f"{kind}: {chips} chips on {workers} workers, which cost until `cleanup`")
        self._check_launch()
        self._make_surroundings()
        return self._bring_up(wait)

    def resume(self, wait: bool = True) -> SliceState:
        """Continue where an interrupted setup or a preemption left off; nothing that is there is made again."""
        self._check_launch()
        return self._bring_up(wait, again=True)

    def watch(self) -> SliceState:
        """Print the log of worker 0 until the training ends; request a preempted slice again. Raises GcloudError."""
        shown = 0
        while True:
            state = self.look()
            if state.phase == "PREEMPTED":
                state, shown = self._bring_up(wait=True), 0
            if state.phase == "RUNNING":
                lines = self.logs(0, f"+{shown + 1}").splitlines()
                shown += len(lines)
                for line in lines:
                    self.say(line)
            if state.phase != "RUNNING" or self.gcloud.dry_run:
                return state
            time.sleep(self.poll)

    def logs(self, worker: int, lines: int | str = 100) -> str:
        """Return the last lines of a worker's log, or of "+N" those from line N on. Raises GcloudError."""
        return self._on_workers(f"log {lines}", str(worker))

    def ssh(self, worker: int) -> int:
        """Open a terminal on a worker and return its exit code."""
        return self.gcloud.open_terminal(*self._vm("ssh", self.settings["TPU_NAME"], f"--worker={worker}"))

    def stop(self) -> SliceState:
        """Stop the training on all workers; it saves first. The slice stays."""
        self._on_workers("stop")
        return SliceState("STOPPED", "its checkpoints are in the bucket")

    def cleanup(self) -> SliceState:
        """Delete the slice and its request; the bucket and the secret are kept."""
        self._delete_request()
        return SliceState("DELETED", f"kept: {self._bucket}")

    def objects_to_delete(self) -> list[str]:
        """Return what `cleanup` deletes, by name."""
        place = f"{self.settings['PROJECT_ID']}, {self.settings['ZONE']}"
        return [f"TPU {self.settings['TPU_NAME']} ({place})", f"queued resource {self._request}"]

    def look(self) -> SliceState:
        """Ask for the request, its machines and the training."""
        found = self.gcloud.describe(*self._queue("describe"))
        if not found:  # also in a dry run
            return SliceState("NEW", "there is no request")
        state = found.get("state") or {}
        name = str(state.get("state"))
        if name == "FAILED":
            error = (state.get("failedData") or {}).get("error") or {}
            return SliceState("REQUEST_FAILED", error.get("message", "no reason given")[:500])
        if name in (*WAITING, *GONE):
            return SliceState("WAITING" if name in WAITING else "PREEMPTED", f"the request is {name}")
        if name != "ACTIVE":
            raise GcloudError(self._queue("describe"), f"unknown state: {name[:60]}", "other")
        machine = (self.gcloud.describe(*self._vm("describe", self.settings["TPU_NAME"])) or {}).get("state", "deleted")
        if machine in LOST_MACHINES:
            return SliceState("PREEMPTED", f"the machines are {machine}")
        return self._look_at_training()

    # ------------------------------------------------------------------ steps

    def _queue(self, verb: str, *flags: str) -> tuple[str, ...]:
        zone = f"--zone={self.settings['ZONE']}"
        return "compute", "tpus", "queued-resources", verb, self._request, *flags, zone

    def _vm(self, verb: str, *words: str) -> tuple[str, ...]:
        return "compute", "tpus", "tpu-vm", verb, *words, f"--zone={self.settings['ZONE']}"

    def _lacks(self, *words: str) -> bool:
        """Return whether a describing command finds nothing; a dry run has to make everything."""
        return self.gcloud.describe(*words) is None or self.gcloud.dry_run

    def _on_workers(self, action: str, worker: str = "all") -> str:
        """Run an action of the worker script, never text of a user."""
        script = f"{FOLDER}/worker.sh"
        text = f"bash {script} {action}"
        if action == "unpack":
            text = f"mkdir -p {FOLDER} && mv worker.sh {FOLDER}/ && {text}"
        name = self.settings["TPU_NAME"]
        return self.gcloud.call_workers(*self._vm("ssh", name, f"--worker={worker}", f"--command={text}"))

    def _check_launch(self) -> None:
        """Say what the workers will run, and refuse what they could not before anything costs."""
        pack_code(self.settings)
        self.say(f"COMMAND: {self.settings['COMMAND']}")
        self.say(f"CONFIG: {find_config(self.settings) or 'none'}")

    def _make_surroundings(self) -> None:
        settings, call = self.settings, self.gcloud.call
        call("services", "enable", *SERVICES, *(("secretmanager.googleapis.com",) if settings.secret else ()))
        if self._lacks("storage", "buckets", "describe", self._bucket):
            call("storage", "buckets", "create", self._bucket, f"--location={settings['ZONE'].rpartition('-')[0]}",
                 "--default-storage-class=STANDARD", "--uniform-bucket-level-access", "--public-access-prevention",
                 )  # fmt: skip
        if settings.key and self._lacks("secrets", "describe", settings.secret):
            call("secrets", "create", settings.secret, "--replication-policy=automatic", "--data-file=-",
                 content=settings.key)  # fmt: skip
        elif settings.key:
            call("secrets", "versions", "add", settings.secret, "--data-file=-", content=settings.key)

    def _bring_up(self, wait: bool, again: bool = False) -> SliceState:
        """Request, wait, prepare and launch, as far as each is missing; request a slice again that is taken away.

        again : also once after a request that failed.
        """
        while True:
            state = self.look()
            if state.phase == "NEW":
                self._request_slice()
                self.requests += 1
                if self.gcloud.dry_run:
                    break
            elif state.phase == "WAITING" and wait:
                self.say(state.describe(self.settings["TPU_NAME"]))
                time.sleep(self.poll)
            elif state.phase == "PREEMPTED" or (state.phase == "REQUEST_FAILED" and again):
                if self.requests >= int(self.settings["REQUESTS"]):
                    used = SliceState("PREEMPTED", f"{self.requests} requests were used, as REQUESTS has it")
                    return used if state.phase == "PREEMPTED" else state
                again = again and state.phase == "PREEMPTED"
                self._delete_request()
            else:
                break
        if state.phase in ("WAITING", "REQUEST_FAILED", "RUNNING", "FINISHED"):
            return state
        if state.phase == "TRAINING_FAILED":  # workers that still run would wait for those that failed
            self._on_workers("stop")
        paths = [str(path) for path in write_worker_files(self.settings, self.folder)]
        self.gcloud.call_workers(*self._vm("scp", *paths, f"{self.settings['TPU_NAME']}:", "--worker=all"))
        for action in ("unpack", "install", "start"):
            self._on_workers(action)
        return SliceState("RUNNING")

    def _request_slice(self) -> None:
        settings = self.settings
        flags = {"node-id": "TPU_NAME", "accelerator-type": "ACCELERATOR_TYPE", "runtime-version": "RUNTIME_VERSION",
                 "network": "NETWORK", "subnetwork": "SUBNETWORK", "service-account": "SERVICE_ACCOUNT",
                 "valid-until-duration": "VALID_UNTIL"}  # fmt: skip
        words = [f"--{flag}={settings[name]}" for flag, name in flags.items() if settings[name]]
        switches = {"spot": "SPOT", "internal-ips": "INTERNAL_IPS"}
        words += [f"--{flag}" for flag, name in switches.items() if settings[name] == "true"]
        words += ["--scopes=https://www.googleapis.com/auth/cloud-platform"]
        self.gcloud.call(*self._queue("create", *words))

    def _look_at_training(self) -> SliceState:
        try:
            text = self._on_workers("state")
        except GcloudError as error:
            if error.kind != "other":
                raise
            return SliceState("ACTIVE", "the workers have no script yet")
        ends = re.findall(r"^ML_FACTORY_WORKER (.*)$", text, re.MULTILINE)
        bad = [end for end in ends if end == "died" or (end.startswith("ended ") and end != "ended 0")]
        if bad:
            return SliceState("TRAINING_FAILED", f"{len(bad)} of {len(ends)} workers: {bad[0]}")
        if len(ends) != self.settings.workers:
            return SliceState("UNREACHABLE", f"{len(ends)} of {self.settings.workers} workers answered")
        if set(ends) == {"ended 0"}:
            return SliceState("FINISHED")
        return SliceState("RUNNING", f"{len(ends)} workers") if "running" in ends else SliceState("READY")

    def _delete_request(self) -> None:
        try:
            self.gcloud.call(*self._queue("delete", "--force"))
        except GcloudError as error:
            if error.kind != "missing":
                raise
