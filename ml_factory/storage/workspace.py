"""The user's folders: data/raw, data/processed, models, checkpoints, results under one root; names of symbols.

The root is the given one, else $ML_FACTORY_ROOT, else Google Drive on Colab, else `workspace` in the checkout, else
`./workspace` when the library was installed without a checkout.
"""

import functools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from ml_factory.errors import (
    FileError,
    NotPreparedError,
    SettingsError,
    UnresponsiveMountError,
    WorkspaceError,
    did_you_mean,
)
from ml_factory.process_identity import process_rank
from ml_factory.storage.files import files, remote_address
from ml_factory.storage.mirror import open_mirror

Verb = TypeVar("Verb", bound=Callable[..., Any])
COLAB_ROOT = Path("/content/drive/MyDrive/ml_factory")
SYMBOL_LENGTH = 32
BAR_MINUTES = tuple(minutes for minutes in range(1, 61) if 60 % minutes == 0)  # lengths that raw bars may have
_RAW = re.compile(r"(.+)_([1-9]\d?)m\.parquet")
_SYMBOL = re.compile(r"[A-Z0-9][A-Z0-9_-]*(\.[A-Z0-9_-]+)*")
_log = logging.getLogger("ml_factory")
_CHECKOUT = Path(__file__).resolve().parents[2]


def check_symbol(symbol: str) -> str:
    """Return the symbol when it is a legal one, such as MES, BTC-USDT or BRK.B.

    Raises SettingsError with a legal spelling: a symbol becomes a folder and must not lead out of the workspace.
    """
    if isinstance(symbol, str) and len(symbol) <= SYMBOL_LENGTH and _SYMBOL.fullmatch(symbol):
        return symbol
    proposal = nearest_legal_symbol(str(symbol))
    raise SettingsError(
        "This symbol cannot be a folder's name",
        where="symbol",
        got=repr(symbol),
        wanted=f"capital letters, digits, '-', '_' and inner dots, at most {SYMBOL_LENGTH} characters",
        next_step=f"use {proposal!r}" if proposal else "use a name such as 'MES'",
    )


def nearest_legal_symbol(text: str) -> str:
    """Return the nearest legal spelling, or '' when no legal character is left."""
    spelling = re.sub(r"[^A-Z0-9_.-]+", "-", text.upper().strip())
    spelling = re.sub(r"\.+(?=-|$)|(?<=-)\.+|\.(?=\.)", "", spelling)  # dots stand only between two words
    spelling = spelling.lstrip("._-")[:SYMBOL_LENGTH].rstrip("._-")
    return spelling if _SYMBOL.fullmatch(spelling) else ""


def on_colab() -> bool:
    """Return True on a real Colab runtime (a stand-in makes `import google.colab` work anywhere)."""
    return "COLAB_RELEASE_TAG" in os.environ or Path("/var/colab/hostname").exists()


def default_workspace_root() -> Path | str:
    """Return the root when none is given."""
    if os.environ.get("ML_FACTORY_ROOT"):
        return os.environ["ML_FACTORY_ROOT"]
    if on_colab():
        if not files.is_folder(COLAB_ROOT.parent):
            # Making the folder now would put a plain folder where Drive is to be mounted, and block the mount.
            raise WorkspaceError(
                "Google Drive is not mounted",
                where=COLAB_ROOT.parent,
                next_step="run setup_colab_environment() first, or give a local WORKSPACE such as /content/ml_factory",
            )
        return COLAB_ROOT
    return (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else Path.cwd()) / "workspace"


class Workspace:
    """The folders of one workspace; makes those that are missing.

    Parameters
    ----------
    root : folder, or gs://bucket/prefix, or "" or None for the default rule (see `default_workspace_root`). A folder on
        a mount and a bucket have a local working copy, `root`: models and results are downloaded at once, checkpoints
        and a symbol's bars and data when they are first used, and `push` uploads what was written.

    Attributes: `address`, what was given, with which another process opens this workspace; `root`, the local folder.

    Raises WorkspaceError when the root is a file, cannot be written, or does not answer where it is elsewhere.
    """

    def __init__(self, root: "str | os.PathLike | Workspace | None" = None):
        given = root.address if isinstance(root, Workspace) else root
        text = os.fspath(given).strip() if given is not None else ""
        text = text or str(default_workspace_root()).strip()
        if "://" not in text:
            text = os.path.abspath(Path(text).expanduser())
        self.address: str = text
        self._mirror = open_mirror(text) if remote_address(text) else None
        # A verb's own functions open its workspace again: what it has pulled is there.
        outer = root if isinstance(root, Workspace) and root._verb else None
        self._verb: list[str] = outer._verb if outer else []  # the outermost verb that runs on it
        self._pulled: set[str] = outer._pulled if outer else set()
        self.root = Path(text) if self._mirror is None else self._mirror.folder
        self._checkpoints = self.root / "checkpoints"
        folders = (self.raw, self.root / "data" / "processed", self.models, self._checkpoints, self.results)
        try:
            for folder in folders:
                files.make_folder(folder)
        except FileError as error:
            raise FileError(
                "A folder of the workspace cannot be made", where=error.where, got=error.got,
                next_step="choose another WORKSPACE, or check that this one is mounted and can be written",
            ) from error  # fmt: skip
        if self._mirror and "://" not in text and not self._mirror.has_synchronized():  # a user looks there
            for folder in folders:
                self._mirror.remote.make_folder(str(folder.relative_to(self.root)))
        if not os.access(self.root, os.W_OK):
            raise WorkspaceError("This workspace cannot be written", where=self.root, next_step="choose another folder")
        self._pull("models/", "results/")

    def push(self) -> None:
        """Upload local changes to the mount or bucket; no effect for a local folder. One that refuses costs a warning,
        and the next push uploads what is missing.
        """
        if self._mirror:
            try:
                self._mirror.push()
            except WorkspaceError as error:
                _log.warning("The newest files are on this machine alone, in %s: %s", self.root, error)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the uploads in the background; return False where something is on this machine alone."""
        return self._mirror is None or self._mirror.wait(seconds)

    def _pull(self, *places: str) -> None:
        """Download these prefixes once per opened workspace, so that later local changes are not undone."""
        pending = [place for place in places if place not in self._pulled]
        if self._mirror and pending:
            try:
                self._mirror.pull(*pending)
            except UnresponsiveMountError as error:
                if not self._mirror.has_synchronized():
                    raise
                _log.warning("Only the local copy %s is used: %s", self.root, error)
            self._pulled.update(pending)

    @property
    def raw(self) -> Path:
        """data/raw, the raw bars."""
        return self.root / "data" / "raw"

    @property
    def models(self) -> Path:
        """models, one folder for each symbol."""
        return self.root / "models"

    @property
    def checkpoints(self) -> Path:
        """checkpoints, one folder for each run."""
        self._pull("checkpoints/")
        return self._checkpoints

    def checkpoints_of(self, run: str) -> Path:
        """checkpoints, of which one run's are needed."""
        self._pull(f"checkpoints/{run}")
        return self._checkpoints

    @property
    def results(self) -> Path:
        """results: predictions, reports, executed notebooks."""
        return self.root / "results"

    def raw_bars(self, symbol: str, minutes: int | None = None) -> Path:
        """Return data/raw/{SYMBOL}_{minutes}m.parquet; the file may not exist yet.

        minutes : length of the bars; None: that of the existing file, 1-minute bars before longer ones, else 1.
        """
        names = [f"{check_symbol(symbol)}_{length}m.parquet" for length in BAR_MINUTES]
        self._pull(*(f"data/raw/{name}" for name in names))
        if minutes is not None:
            return self.raw / names[BAR_MINUTES.index(minutes)]
        existing = set(files.names(self.raw))
        return self.raw / next((name for name in names if name in existing), names[0])

    def processed(self, symbol: str) -> Path:
        """Return data/processed/{SYMBOL}; the folder is made with the first file written there."""
        self._pull(f"data/processed/{check_symbol(symbol)}/")
        return self.root / "data" / "processed" / symbol

    def __repr__(self) -> str:
        return f"Workspace({self.address!r})"


def parse_raw_bars_name(name: str) -> tuple[str, int] | None:
    """Split a file name of data/raw, such as MES_5m.parquet, into (symbol, minutes of a bar); None for other names."""
    found = _RAW.fullmatch(name)
    return (found[1], int(found[2])) if found and int(found[2]) in BAR_MINUTES else None


def require_raw_bars(workspace: Workspace, symbol: str) -> Path:
    """Return the symbol's raw file. Raises NotPreparedError where none exists."""
    path = workspace.raw_bars(symbol)
    if files.is_file(path):
        return path
    symbols = workspace_symbols(workspace)
    raise NotPreparedError(
        "There are no raw bars for this symbol",
        where=path,
        got="no file; symbols here: " + (", ".join(symbols) or "none"),
        wanted="bars as Parquet, their length in the name: SYMBOL_1m.parquet, SYMBOL_5m.parquet",
        next_step=(did_you_mean(symbol, symbols) + "; else " if symbol and did_you_mean(symbol, symbols) else "")
        + f"put the file there, or run: python -m ml_factory prepare --data YOUR_FILE --symbol {symbol}",
    )


def workspace_symbols(workspace: Workspace) -> list[str]:
    """List the symbols with raw bars in this workspace, sorted."""
    return sorted({found[0] for found in map(parse_raw_bars_name, files.names(workspace.raw)) if found})


def push_workspace_on_exit(verb: Verb) -> Verb:
    """Decorate a function whose first argument is a workspace: its changes are uploaded where it is elsewhere, also
    when it fails, because complete checkpoints and parts are worth keeping.
    """

    @functools.wraps(verb)
    def run(workspace: "str | os.PathLike | Workspace | None", *args: Any, **settings: Any) -> Any:
        workspace = Workspace(workspace)
        if workspace._verb:  # which uploads at its end
            return verb(workspace, *args, **settings)
        workspace._verb.append(verb.__name__)
        try:
            return verb(workspace, *args, **settings)
        finally:
            workspace._verb.clear()
            if process_rank() == 0:
                workspace.push()

    return cast(Verb, run)
