"""Set up any runtime with one call: Drive, packages, accelerator, secrets, folders, and one table of versions.

    from utils.colab_setup import setup_colab_environment
    env_info = setup_colab_environment()

The same call works on Colab, on a workstation and in CI. Nothing that is to be installed is imported here, so it also
runs before any package is.
"""

import contextlib
import dataclasses
import getpass
import importlib
import io
import math
import os
import platform
import sys
import textwrap
import threading
from pathlib import Path

from ml_factory.checkpoints.schedule import FREE_TPU_HOURS, configured_hours_remaining, is_free_tpu_session
from ml_factory.errors import SettingsError, WorkspaceError, did_you_mean
from ml_factory.redaction import has_wandb_key
from ml_factory.storage import workspace as workspaces
from ml_factory.storage.files import files, mount_of
from ml_factory.storage.remote import Remote
from ml_factory.tracking.wandb_process import MODES, wandb_mirror_mode
from utils import runtime

LOCAL_ROOT = Path("/content/ml_factory_local")  # on Colab when Drive is refused; gone with the runtime


@dataclasses.dataclass(frozen=True)
class ColabEnvironmentInfo:
    """Description of this runtime.

    Parameters
    ----------
    on_colab : True on a Colab runtime.
    accelerator : cuda, tpu or cpu; `device_name` is the model.
    workspace : the opened workspace.
    versions : package -> version.
    hours_remaining : float, math.inf where nothing ends the session.
    tracking : online, offline or off.
    installed : packages added by this call.
    notes : lines for the user.
    """

    on_colab: bool
    accelerator: str
    workspace: workspaces.Workspace
    versions: dict[str, str]
    hours_remaining: float
    device_name: str = ""
    tracking: str = "offline"
    installed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str):
        """Return a field by name, as `env_info["workspace"]`."""
        return getattr(self, name)

    def table(self) -> str:
        """Format the version table and the notes as text."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        rows = {
            "runtime": f"{'Colab' if self.on_colab else platform.system()}, {os.cpu_count()} cores, {memory:.1f} GiB",
            "accelerator": self.accelerator + (f" ({self.device_name})" if self.device_name else ""),
            "code": str(runtime.ROOT),
            "workspace": self.workspace.address,
            "time left": _time_left(self.hours_remaining),
            "tracking": f"wandb {self.tracking}",
            "installed": ", ".join(self.installed),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        lines = [*rows.items(), *(("note", note) for note in self.notes)]
        return "\n".join(
            textwrap.fill(
                text, 110, initial_indent=f"{name:<12} ", subsequent_indent=" " * 13, break_long_words=False,
                break_on_hyphens=False,
            )
            for name, text in lines if text
        )  # fmt: skip


def setup_colab_environment(
    workspace: "str | os.PathLike | workspaces.Workspace | None" = None,
    wandb: "bool | str | None" = None,
    install: bool = True,
) -> ColabEnvironmentInfo:
    """Set up this runtime, print one table, and return its description. Calling it again changes nothing more.

    Parameters
    ----------
    workspace : the root of the workspace; None or "" for the usual rule (on Colab, Drive is mounted for it).
    wandb : None keeps the environment's setting; True or "auto", "offline", False or "off" set it.
    install : on Colab, install the packages that the runtime lacks.

    Raises RuntimeMismatchError for packages that cannot work together or cannot be installed, WorkspaceError for a
    workspace that cannot be used, SettingsError for an unknown choice.
    """
    workspace = None if workspace is ... else workspace  # a guide writes the call with three dots
    colab, notes = workspaces.on_colab(), []
    _set_tracking_mode(wandb)
    runtime.check_torch_xla_pair(runtime.installed_versions())
    root = _choose_root(workspace, colab, notes)
    tpu, gpu = runtime.tpu_chip(), runtime.gpu_name()
    installed = ()
    in_bucket = str(root or "").startswith("gs://")
    if install and colab:
        extra = tuple(runtime.read_requirement_lines(runtime.BUCKETS)) if in_bucket else ()
        path = runtime.ROOT / "requirements" / f"colab-{'tpu' if tpu else 'gpu'}.txt"
        installed = runtime.install_missing_packages(path, extra)
    if colab and in_bucket:
        _sign_in(root)
    versions = runtime.installed_versions()
    runtime.check_torch_xla_pair(versions)
    accelerator, device_name = runtime.choose_accelerator(tpu, gpu, versions, notes)
    root = workspaces.Workspace(root)
    info = ColabEnvironmentInfo(
        on_colab=colab,
        accelerator=accelerator,
        workspace=root,
        versions=versions,
        hours_remaining=estimate_training_time_remaining(),
        device_name=device_name,
        tracking=_prepare_tracking(colab, root, notes),
        installed=installed,
        notes=(*notes, *runtime.missing_requirements()),
    )
    print(info.table())
    return info


# ------------------------------------------------------------------ the time left


def estimate_training_time_remaining(tier: str | None = None, limit_hours: float | None = None) -> float:
    """Return the hours until Colab may end this runtime, counted from its real start; math.inf where nothing ends
    it.

    Parameters
    ----------
    tier : free (12 h), pro, pro+ or enterprise (24 h). A runtime does not know its tier: give it here, or by
        ML_FACTORY_COLAB_TIER; free is assumed.
    limit_hours : the limit itself, overrides any tier; also ML_FACTORY_SESSION_HOURS, which counts off Colab too.

    An upper bound: an idle page, or used-up units, can end a runtime sooner.
    """
    return configured_hours_remaining(tier, limit_hours)


# ------------------------------------------------------------------ Drive and the workspace


def mount_drive(mountpoint: "str | os.PathLike | None" = None) -> str:
    """Mount Google Drive once; return '' when it is mounted, else the reason. For Colab's main thread only."""
    mountpoint = Path(mountpoint or workspaces.COLAB_ROOT.parents[1])
    if threading.current_thread() is not threading.main_thread():
        return "Drive prompts the user on the page, so only a cell can mount it, never a thread"
    state = _mount_state(mountpoint)
    if state == "alive":
        return ""
    try:
        importlib.import_module("google.colab.drive").mount(str(mountpoint), force_remount=state == "dead")
    except Exception as error:  # noqa: BLE001 - google.colab has errors of its own, and needs a page and a kernel
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    try:
        mounted = "MyDrive" in Remote(str(mountpoint)).names()
    except WorkspaceError as error:
        return f"{mountpoint} does not answer after mounting: {error.got}"
    return "" if mounted else f"{mountpoint / 'MyDrive'} is missing after mounting"


def _mount_state(mountpoint: Path) -> str:
    """Return "alive", "dead" (mounted, but disconnected: ENOTCONN, EIO, ESTALE, or no answer) or "absent"."""
    try:
        return "alive" if mount_of(mountpoint) == str(mountpoint) and Remote(str(mountpoint)).names() else "absent"
    except WorkspaceError:
        return "dead"


def _choose_root(workspace, colab: bool, notes: list[str]):
    """Return the root for Workspace. Drive is mounted when the root is on it, and only then."""
    if os.environ.get("ML_FACTORY_ROOT") == str(LOCAL_ROOT):
        del os.environ["ML_FACTORY_ROOT"]  # an earlier call fell back to it; try Drive again
    if isinstance(workspace, workspaces.Workspace):
        workspace = workspace.address
    given = (os.fspath(workspace).strip() if workspace is not None else "") or os.environ.get("ML_FACTORY_ROOT", "")
    mountpoint = workspaces.COLAB_ROOT.parents[1]
    if not colab or (given and not Path(os.path.abspath(given)).is_relative_to(mountpoint)):
        return given or None
    reason = mount_drive(mountpoint)
    if not reason:
        return given or workspaces.COLAB_ROOT
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


def _sign_in(address: str) -> None:
    """Sign in to Google Cloud through the page, unless a key file or an emulator is configured.

    Raises WorkspaceError when the user refuses.
    """
    if any(os.environ.get(name) for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST")):
        return
    try:
        importlib.import_module("google.colab.auth").authenticate_user()
    except Exception as error:
        raise WorkspaceError(
            "Google Cloud did not let this session in", where=address, got=f"{type(error).__name__}: {error}",
            next_step="run this cell again and allow the access, or set GOOGLE_APPLICATION_CREDENTIALS to a key file",
        ) from error  # fmt: skip


# ------------------------------------------------------------------ secrets


def _set_tracking_mode(wandb: "bool | str | None") -> None:
    """Store the choice in the environment, where the tracker reads it; None keeps the present one."""
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


def _prepare_tracking(colab: bool, workspace: workspaces.Workspace, notes: list[str]) -> str:
    """Return online, offline or off. A key from the environment or Colab's secrets stays in this process's
    environment.
    """
    mode = wandb_mirror_mode("auto")
    requested = {os.environ.get("ML_FACTORY_WANDB"), os.environ.get("WANDB_MODE")} & {"offline", "dryrun"}
    if mode != "offline" or requested:
        return mode
    key, reason = _read_colab_secret("WANDB_API_KEY", colab)
    if key:
        os.environ["WANDB_API_KEY"] = key
    elif _can_prompt():
        reason = _log_in(workspace)
    if reason:
        notes.append(f"wandb is offline ({reason}); the log in the workspace is complete without it")
    return wandb_mirror_mode("auto")


def _can_prompt() -> bool:
    """Return True when the user can type below this cell: not under papermill or nbval, and not in a script."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and bool(getattr(getattr(shell, "kernel", None), "_allow_stdin", False))


def _log_in(workspace: workspaces.Workspace) -> str:
    """Prompt for a W&B key, once per workspace; return "" when logged in, else the reason why not.

    The wandb client stores the key in .netrc of this machine, as `wandb login` does. An empty answer is remembered in
    the workspace, so that no other notebook prompts again.
    """
    declined = workspace.root / "wandb_login.txt"
    if files.is_file(declined):
        return f"declined in this workspace; to be asked again, delete {declined}"
    key = getpass.getpass("W&B API key from https://wandb.ai/authorize, or Enter to work without: ").strip()
    if not key:
        text = "No W&B key was given when a notebook asked. Delete this file to be asked again.\n"
        files.write(declined, text.encode())
        return "no key given; later: wandb login, WANDB_API_KEY, or Colab's secret of that name"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its warning is about keys in cells
            importlib.import_module("wandb").login(key=key, verify=False)
    except Exception as error:  # noqa: BLE001 - of any package below the client; its text may repeat the key
        return f"the key was refused: {type(error).__name__}; run this cell again, or leave the field empty"
    return "" if has_wandb_key() else "the W&B client did not store the key; set WANDB_API_KEY"


def _read_colab_secret(name: str, colab: bool) -> tuple[str, str]:
    """Return (secret, "") from the environment, then from Colab's secrets; ("", reason) when neither has it."""
    value = os.environ.get(name, "").strip()
    if value or not colab:
        return value, "" if value else f"no {name} in the environment"
    try:
        value = importlib.import_module("google.colab.userdata").get(name)
    except Exception as error:  # noqa: BLE001 - google.colab has errors of its own, and needs a page and a kernel
        return "", f"{name}: {type(error).__name__}"
    value = str(value or "").strip()
    return value, "" if value else f"{name} is empty in Colab's secrets"


def load_database_secrets() -> list[str]:
    """Put PGPASSWORD and DATABASE_URL of Colab's secrets into this process's environment, for `export-data`.

    What the environment already has stays. Returns the names that are set now; their values are printed nowhere.
    """
    for name in ("PGPASSWORD", "DATABASE_URL"):
        value, _ = _read_colab_secret(name, True)
        if value:
            os.environ[name] = value
    return [name for name in ("PGPASSWORD", "DATABASE_URL") if os.environ.get(name)]


# ------------------------------------------------------------------ printing


def _time_left(hours: float) -> str:
    usual = f"; a free TPU session usually ends after {FREE_TPU_HOURS:.1f} h" if is_free_tpu_session() else ""
    return "no limit" if math.isinf(hours) else f"at most {hours:.1f} h{usual}"
