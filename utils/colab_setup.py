"""One call that makes any runtime ready: Drive, packages, accelerator, secrets, folders, and one table of versions.

    from utils.colab_setup import setup_colab_environment
    env_info = setup_colab_environment()

The same call works on Colab, on a workstation and in CI. Only the standard library is imported here, so it also runs
before anything is installed.
"""

import dataclasses
import importlib
import math
import os
import platform
import textwrap
import threading
from pathlib import Path

from ml_factory.errors import SettingsError, WorkspaceError, did_you_mean
from ml_factory.runs import mounts
from ml_factory.runs import workspace as places
from ml_factory.runs.mirror import MODES, mirror_mode
from ml_factory.runs.session import hours_left
from utils import runtime

LOCAL_ROOT = Path("/content/ml_factory_local")  # on Colab when Drive is refused; gone with the runtime


@dataclasses.dataclass(frozen=True)
class EnvInfo:
    """What this runtime is.

    accelerator : cuda, tpu or cpu; `device` is torch's word for it (tpu -> xla), `device_name` the model.
    hours_remaining : float, math.inf where nothing ends the session.
    tracking : online, offline or off.
    installed : what was added just now; notes : lines that a person should read.
    """

    on_colab: bool
    accelerator: str
    workspace: places.Workspace
    versions: dict[str, str]
    hours_remaining: float
    device_name: str = ""
    tracking: str = "offline"
    installed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """cuda, xla or cpu."""
        return {"tpu": "xla"}.get(self.accelerator, self.accelerator)

    def table(self) -> str:
        """The version table and the notes, as text."""
        rows = {
            "runtime": f"{'Colab' if self.on_colab else platform.system()}, {os.cpu_count()} cores, {_memory()}",
            "accelerator": self.accelerator + (f" ({self.device_name})" if self.device_name else ""),
            "workspace": str(self.workspace.root),
            "time left": "no limit" if math.isinf(self.hours_remaining) else f"{self.hours_remaining:.1f} h",
            "tracking": f"wandb {self.tracking}",
            "installed": ", ".join(self.installed),
        }
        lines = [_row(name, text) for name, text in rows.items() if text]
        return "\n".join([*lines, *_grid(self.versions), *(_row("note", note) for note in self.notes)])


def setup_colab_environment(
    workspace: "str | os.PathLike | places.Workspace | None" = None,
    wandb: "bool | str | None" = None,
    install: "bool | str" = True,
) -> EnvInfo:
    """Make this runtime ready, print one table, and say what it is. Calling it again changes nothing more.

    Parameters
    ----------
    workspace : the root of the workspace; None or "" for the usual rule (on Colab, Drive is mounted for it).
    wandb : None keeps what the environment says; True or "auto", "offline", False or "off" set it.
    install : True installs on Colab what that runtime lacks; "always" does so elsewhere too; False installs nothing.

    Raises RuntimeMismatchError for packages that cannot work together or cannot be installed, WorkspaceError for a
    workspace that cannot be used, SettingsError for an unknown choice.
    """
    if install not in (True, False, "always"):
        raise SettingsError("Unknown choice", where="install", got=repr(install), wanted="True, False or 'always'")
    colab, notes = places.on_colab(), []
    _ask_for_tracking(wandb)
    runtime.refuse_impossible_pair(runtime.installed_versions())
    root = _choose_root(workspace, colab, notes)
    tpu, gpu = runtime.tpu_chip(), runtime.gpu_name()
    installed = ()
    if install == "always" or (install and colab):
        installed = runtime.install_missing(runtime.requirements_for(colab, tpu))
    versions = runtime.installed_versions()
    runtime.refuse_impossible_pair(versions)
    accelerator, device_name = runtime.choose_accelerator(tpu, gpu, versions, notes)
    info = EnvInfo(
        on_colab=colab,
        accelerator=accelerator,
        workspace=places.Workspace(root),
        versions=versions,
        hours_remaining=estimate_training_time_remaining(),
        device_name=device_name,
        tracking=_prepare_tracking(colab, notes),
        installed=installed,
        notes=(*notes, *runtime.still_missing(), *runtime.replaced_after_import()),
    )
    print(info.table())
    return info


# ------------------------------------------------------------------ the time left


def estimate_training_time_remaining(tier: str | None = None, limit_hours: float | None = None) -> float:
    """Hours until Colab may end this runtime, counted from its real start; math.inf where nothing ends it.

    Parameters
    ----------
    tier : free (12 h), pro, pro+ or enterprise (24 h). A runtime is not told its tier: give it here, or by
        ML_FACTORY_COLAB_TIER; free is assumed.
    limit_hours : the limit itself, over any tier; also ML_FACTORY_SESSION_HOURS, which counts off Colab too.

    An upper bound: an idle page, or units used up, can end a runtime sooner.
    """
    return hours_left(tier, limit_hours)


# ------------------------------------------------------------------ Drive and the workspace


def mount_drive(mountpoint: "str | os.PathLike | None" = None) -> str:
    """Mount Google Drive once; '' when it is there, else the reason why not. For Colab's main thread only."""
    mountpoint = Path(mountpoint or places.COLAB_ROOT.parents[1])
    if threading.current_thread() is not threading.main_thread():
        return "Drive asks the person at the page, so only a cell can mount it, never a thread"
    state = _mount_state(mountpoint)
    if state == "alive":
        return ""
    try:
        importlib.import_module("google.colab.drive").mount(str(mountpoint), force_remount=state == "dead")
    except (ImportError, *_colab_failures()) as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    try:
        there = mounts.kind(mountpoint / "MyDrive") == "folder"
    except OSError as error:
        return f"{mountpoint} does not answer after mounting: {error.strerror}"
    return "" if there else f"{mountpoint / 'MyDrive'} is not there after mounting"


def safe_stop(seconds: float = 300, logs=()) -> bool:
    """Before this machine is given back: wait for the checkpoints, let `logs` (callables) write theirs, and on Colab
    flush Drive, which also unmounts it (there is no call that only flushes). Prints how far each checkpoint has come,
    and prints and tells whether all is safe.

    seconds : for all of it; on expiry nothing is confirmed.
    """
    flush = None
    if places.on_colab():
        drive = importlib.import_module("google.colab.drive")

        def flush() -> None:
            drive.flush_and_unmount(timeout_ms=int(1000 * seconds))

    stopped = importlib.import_module("ml_factory.runs.checkpoints").safe_stop(seconds, logs=logs, flush=flush)
    return stopped.safe


def _mount_state(mountpoint: Path) -> str:
    """alive, dead (mounted, but the other end is gone: ENOTCONN, EIO, ESTALE, or no answer at all) or absent."""
    try:
        return "alive" if mounts.is_top(mountpoint) and mounts.names(mountpoint) else "absent"
    except OSError:
        return "dead"


def _choose_root(workspace, colab: bool, notes: list[str]):
    """The root to hand to Workspace. Drive is mounted when the root is on it, and only then."""
    if os.environ.get("ML_FACTORY_ROOT") == str(LOCAL_ROOT):
        del os.environ["ML_FACTORY_ROOT"]  # an earlier call fell back to it; try Drive again
    if isinstance(workspace, places.Workspace):
        workspace = workspace.root
    given = (os.fspath(workspace).strip() if workspace is not None else "") or os.environ.get("ML_FACTORY_ROOT", "")
    mountpoint = places.COLAB_ROOT.parents[1]
    if not colab or (given and not Path(os.path.abspath(given)).is_relative_to(mountpoint)):
        return given or None
    reason = mount_drive(mountpoint)
    if not reason:
        return given or places.COLAB_ROOT
    if given:
        raise WorkspaceError(
            "Google Drive could not be mounted",
            where=given,
            got=reason,
            next_step="run this cell again and allow the access, or give a WORKSPACE outside Drive",
        )
    os.environ["ML_FACTORY_ROOT"] = str(LOCAL_ROOT)  # so that Workspace() means this folder everywhere
    notes.append(
        f"Drive is not mounted ({reason}): working in {LOCAL_ROOT}, which is LOST with this runtime. "
        "Next: run this cell again and allow the access."
    )
    return LOCAL_ROOT


def _colab_failures() -> tuple[type[Exception], ...]:
    """What google.colab's calls raise: its own errors, and what they run into without a page or a kernel."""
    failures: list[type[Exception]] = [ValueError, NotImplementedError, OSError, AttributeError, KeyError]
    for name, classes in {
        "google.colab.errors": ("Error",),
        "google.colab.userdata": ("SecretNotFoundError", "TimeoutException", "NotebookAccessError"),
        "pexpect": ("ExceptionPexpect",),
    }.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        failures += [getattr(module, each) for each in classes if hasattr(module, each)]
    return tuple(failures)


# ------------------------------------------------------------------ secrets


def _ask_for_tracking(wandb: "bool | str | None") -> None:
    """Put the choice where the tracker reads it; None leaves what is there."""
    if wandb is None:
        return
    mode = {True: "auto", False: "off"}.get(wandb, wandb)
    if mode not in MODES:
        short = len(str(mode)) <= 12  # a longer value is not repeated: people paste their key here
        raise SettingsError(
            "Unknown choice",
            where="wandb",
            got=repr(mode) if short else f"{len(str(mode))} characters",
            wanted="True, False, 'auto', 'offline' or 'off'",
            next_step=did_you_mean(mode, MODES) if short else "put a key into WANDB_API_KEY instead",
        )
    os.environ["ML_FACTORY_WANDB"] = mode


def _prepare_tracking(colab: bool, notes: list[str]) -> str:
    """online, offline or off. A key goes into this process's environment for the wandb client, and nowhere else."""
    mode = mirror_mode("auto")
    asked_offline = "offline" in (os.environ.get("ML_FACTORY_WANDB"), os.environ.get("WANDB_MODE"))
    if mode != "offline" or asked_offline or os.environ.get("WANDB_MODE") == "dryrun":
        return mode
    key, reason = read_secret("WANDB_API_KEY", colab)
    if key:
        os.environ["WANDB_API_KEY"] = key
        return mirror_mode("auto")
    notes.append(f"wandb is offline ({reason}); the record in the workspace is whole without it")
    return mode


def read_secret(name: str, colab: bool) -> tuple[str, str]:
    """(secret, "") from the environment, then from Colab's secrets; ("", reason) when neither gives it."""
    value = os.environ.get(name, "").strip()
    if value or not colab:
        return value, "" if value else f"no {name} in the environment"
    try:
        value = importlib.import_module("google.colab.userdata").get(name)
    except (ImportError, *_colab_failures()) as error:
        return "", f"{name}: {type(error).__name__}"
    value = str(value or "").strip()
    return value, "" if value else f"{name} is empty in Colab's secrets"


# ------------------------------------------------------------------ printing


def _row(name: str, text: str) -> str:
    return textwrap.fill(text, 110, initial_indent=f"{name:<12} ", subsequent_indent=" " * 13, break_long_words=False)


def _grid(versions: dict[str, str], columns: int = 4) -> list[str]:
    """The versions in columns, read downwards."""
    width = max(map(len, versions))
    cells = [f"{name:<{width}} {version:<12}"[: width + 13] for name, version in versions.items()]
    height = -(-len(cells) // columns)
    return ["  ".join(cells[row::height]).rstrip() for row in range(height)]


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (AttributeError, ValueError, OSError):
        return "memory unknown"
