"""A stand-in for `google.colab`, so that a notebook written for Colab also runs on a workstation and in tests.

    from utils.google_colab_shim import install_colab_shim
    install_colab_shim()            # False, and no effect, on a real Colab runtime
    from google.colab import drive
    drive.mount("/tmp/drive")       # a plain folder with MyDrive in it

Names, signatures, printed lines and exception classes are Colab's; tests compare them with a checked-in description.
Calls that need a browser page have no effect, or raise what Colab raises without a page. The modules live in
sys.modules alone: a real folder named google on sys.path would hide google.auth and google.protobuf.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

from ml_factory.storage.workspace import on_colab

_NAME = "google.colab"
_added: list[str] = []
_mounts: set[str] = set()
_unmounted: set[str] = set()
_callbacks: dict[str, object] = {}


def install_colab_shim() -> bool:
    """Register the stand-in as `google.colab`. Returns False where Colab's own exists; True when in place."""
    if is_colab_shim_installed():
        return True
    if on_colab() or _NAME in sys.modules or _real_one():
        return False
    if "google" not in sys.modules and importlib.util.find_spec("google") is None:
        # Nothing on this machine is called google yet. The path entries need not exist: what is installed there later
        # is found, as it would be in the namespace package that Python makes by itself.
        google = types.ModuleType("google")
        google.__path__ = [str(Path(entry) / "google") for entry in sys.path if entry]
        _add("google", google)
    google = importlib.import_module("google")
    package = _add(_NAME, types.ModuleType(_NAME, __doc__))
    package.__path__ = []
    package.__all__ = ["auth", "data_table", "drive", "errors", "files", "output", "runtime", "userdata"]
    for name in package.__all__:
        module = _add(f"{_NAME}.{name}", types.ModuleType(f"{_NAME}.{name}"))
        for key, value in _MODULES[name].items():
            setattr(module, key, value)
        setattr(package, name, module)
    google.colab = package
    return True


def uninstall_colab_shim() -> None:
    """Remove the modules that install_colab_shim() registered."""
    if is_colab_shim_installed() and "google" in sys.modules:
        vars(sys.modules["google"]).pop("colab", None)
    while _added:
        sys.modules.pop(_added.pop(), None)
    _mounts.clear()
    _unmounted.clear()


def is_colab_shim_installed() -> bool:
    """Return True when `google.colab` in this process is this stand-in."""
    return _NAME in _added and _NAME in sys.modules


def _add(name: str, module: types.ModuleType) -> types.ModuleType:
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=name in ("google", _NAME))
    sys.modules[name] = module
    _added.append(name)
    return module


def _real_one() -> bool:
    try:
        return importlib.util.find_spec(_NAME) is not None
    except ModuleNotFoundError:
        return False


# ------------------------------------------------------------------ google.colab.errors


class Error(Exception):
    """Base of Colab's errors."""


class AuthorizationError(Error):
    """Authorization failed."""


class RuntimeManagementError(Error):
    """The runtime could not be managed."""


class WidgetException(Exception):
    """A widget failed."""


# ------------------------------------------------------------------ google.colab.userdata


class NotebookAccessError(Exception):
    """This notebook was not given access to the secret."""

    def __init__(self, key):
        super().__init__(f"Notebook does not have access to secret {key}")


class SecretNotFoundError(Error):
    """There is no such secret."""

    def __init__(self, key):
        super().__init__(f"Secret {key} does not exist.")


class TimeoutException(Error):
    """No page answered."""

    def __init__(self, key):
        super().__init__(f"Requesting secret {key} timed out. Secrets can only be fetched from the Colab page.")


def get(key):
    """Return the secret of that name; here, the environment variable of that name."""
    if key not in os.environ:
        raise SecretNotFoundError(key)
    return os.environ[key]


# ------------------------------------------------------------------ google.colab.drive


def mount(mountpoint, force_remount=False, timeout_ms=120000, readonly=False):
    """Mount Google Drive; here, make a plain folder with MyDrive in it (readonly is taken, and not enforced)."""
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    mountpoint = os.path.expanduser(mountpoint)
    folder = Path(mountpoint)
    mounted = (folder / "MyDrive").is_dir() and mountpoint not in _unmounted
    if mounted and not force_remount:
        print(
            f"Drive already mounted at {mountpoint}; to attempt to forcibly remount, "
            f'call drive.mount("{mountpoint}", force_remount=True).'
        )
        return
    if folder.is_symlink():
        raise ValueError("Mountpoint must not be a symlink")
    if folder.is_dir() and not (folder / "MyDrive").is_dir() and any(folder.iterdir()):
        raise ValueError("Mountpoint must not already contain files")
    if folder.exists() and not folder.is_dir():
        raise ValueError("Mountpoint must either be a directory or not exist")
    if not Path(os.path.normpath(mountpoint)).parent.exists():
        raise ValueError("Mountpoint must be in a directory that exists")
    try:
        (folder / "MyDrive").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"mount failed: {error.strerror}") from error
    _unmounted.discard(mountpoint)
    _mounts.add(mountpoint)
    print(f"Mounted at {mountpoint}")


def flush_and_unmount(timeout_ms=24 * 60 * 60 * 1000):
    """Flush and unmount, both; here the files stay where they are, and the next mount finds them."""
    if not _mounts:
        print("Drive not mounted, so nothing to flush and unmount.")
        return
    _unmounted.update(_mounts)
    _mounts.clear()


# ------------------------------------------------------------------ google.colab.auth, runtime


def authenticate_user(clear_output=True, project_id=None):
    """Sign the person in; here the machine's own application default credentials stand."""
    if project_id:
        os.environ["GOOGLE_CLOUD_PROJECT"] = project_id


def authenticate_service_account(clear_output=True):
    """Sign a service account in; here the machine's own application default credentials stand."""


def unassign():
    """Give the runtime back; here there is no runtime to give back."""
    raise RuntimeManagementError("Unable to find the runtime management service.")


# ------------------------------------------------------------------ google.colab.files


def upload(target_dir=""):
    """Let the person pick files; without a page, nothing was picked."""
    return {}


def upload_file(filename):
    """Let the person pick one file."""
    raise ValueError("File has not been uploaded")


def download(filename):
    """Send a file to the browser; here it is already on the user's machine."""
    _must_exist(filename)


def view(filepath):
    """Open a file in Colab's viewer."""
    _must_exist(filepath)


def _must_exist(path) -> None:
    if not os.path.exists(path):
        raise FileNotFoundError(f"Cannot find file: {path}")


# ------------------------------------------------------------------ google.colab.output


def clear(wait=False, output_tags=()):
    """Clear the cell's output; here only the streams are flushed."""
    sys.stdout.flush()
    sys.stderr.flush()


def eval_js(script, ignore_result=False, timeout_sec=None):
    """Run JavaScript in the page; without one, None."""


def register_callback(function_name, callback):
    """Let the page's JavaScript call `callback`."""
    _callbacks[function_name] = callback


@contextlib.contextmanager
def use_tags(tags, append=True):
    """Tag the outputs made within."""
    yield {tags} if isinstance(tags, str) else set(tags)


@contextlib.contextmanager
def temporary():
    """Outputs made within are cleared at its end."""
    yield


@contextlib.contextmanager
def redirect_to_element(selector):
    """Outputs made within go to an element of the page."""
    yield


def enable_custom_widget_manager(version="5.0.0a"):
    """Let third-party widgets load in Colab's page; Jupyter always allows them."""


def disable_custom_widget_manager():
    """Disable third-party widgets; no effect here."""


def serve_kernel_port_as_iframe(port, path="/", width="100%", height="400", cache_in_notebook=False):
    """Show a port of the kernel in the output."""
    print(f"http://localhost:{port}{path}")


def serve_kernel_port_as_window(port, path="/", anchor_text=None):
    """Show a link to a port of the kernel."""
    print(f"http://localhost:{port}{path}")


# ------------------------------------------------------------------ google.colab.data_table


class DataTable:
    """An interactive table; here the frame's own."""

    include_index = True
    num_rows_per_page = 25
    max_rows = 20000
    max_columns = 20
    min_width = None

    def __init__(
        self, dataframe, include_index=None, num_rows_per_page=None, max_rows=None, max_columns=None, min_width=None
    ):
        self._dataframe = dataframe

    def _repr_html_(self):
        return self._dataframe._repr_html_()

    def __repr__(self):
        return repr(self._dataframe)


def enable_dataframe_formatter():
    """Show every frame as a DataTable."""


def disable_dataframe_formatter():
    """Show frames as pandas does; no effect here."""


def load_ipython_extension(ipython):
    """%load_ext google.colab.data_table"""


def unload_ipython_extension(ipython):
    """%unload_ext google.colab.data_table"""


def _members(*members) -> dict[str, object]:
    return {member.__name__: member for member in members}


_MODULES: dict[str, dict[str, object]] = {
    "errors": _members(Error, AuthorizationError, RuntimeManagementError, WidgetException),
    "userdata": _members(get, NotebookAccessError, SecretNotFoundError, TimeoutException),
    "drive": _members(mount, flush_and_unmount),
    "auth": _members(authenticate_user, authenticate_service_account),
    "runtime": _members(unassign),
    "files": _members(upload, upload_file, download, view),
    "output": _members(
        clear, eval_js, register_callback, use_tags, temporary, redirect_to_element, enable_custom_widget_manager,
        disable_custom_widget_manager, serve_kernel_port_as_iframe, serve_kernel_port_as_window,
    ),
    "data_table": _members(
        DataTable, enable_dataframe_formatter, disable_dataframe_formatter, load_ipython_extension,
        unload_ipython_extension,
    ),
}  # fmt: skip
for _module, _contents in _MODULES.items():
    for _member in _contents.values():
        _member.__module__ = f"{_NAME}.{_module}"
