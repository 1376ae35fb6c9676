"""Run notebooks through papermill: one by name, or the eight in order."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.notebook_parameters import (
    convert_notebook_parameters,
    read_notebook,
    read_notebook_parameters,
)
from ml_factory.progress import progress_phase
from ml_factory.redaction import redact_values
from ml_factory.storage.files import files, stored_path
from ml_factory.storage.workspace import Workspace

papermill = LazyModule("papermill")

FOLDER = Path(__file__).resolve().parents[1] / "colab_notebooks"


def _suite_notebooks() -> dict[str, Path]:
    """Return name -> file, in order. Raises FactoryError where the library was installed without a checkout."""
    found = {path.stem: path for path in sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))}
    if not found:
        raise FactoryError(
            "No notebooks found: the library was installed without its checkout", where=FOLDER,
            next_step="clone the repository and run this there",
        )  # fmt: skip
    return found


def find_suite_notebook(name: str) -> Path:
    """Return the file of a notebook given by name (02_train_tabular, 02) or by path. Raises SettingsError."""
    known = _suite_notebooks()
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name)
    wanted = Path(name).stem
    for stem, path in known.items():
        if wanted in (stem, stem[:2]):
            return path
    raise SettingsError("No such notebook", where="notebook", got=repr(name), next_step=did_you_mean(wanted, known))


def run_suite_notebook(path: Path, out: Path, given: Mapping[str, str]) -> Path:
    """Check names and types of the parameters, then run the notebook headless; `out` is the executed copy.

    given : parameter -> text, as on a command line.

    Raises SettingsError before anything runs, a FactoryError naming the cell that failed.
    """
    values = convert_notebook_parameters(path, given)
    out.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    try:
        papermill.execute_notebook(
            path, out, parameters=values, cwd=path.parent, progress_bar=False, log_output=False,
            kernel_name="python3", extra_arguments=["--IPKernelApp.log_level=50"],  # hides the kernel's log
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        raise FactoryError(
            f"{path.name} stopped: {error.ename}: {error.evalue}", where=f"cell {error.cell_index + 1}",
            next_step=f"open {out}, which shows the cell and its traceback",
        ) from error  # fmt: skip
    finally:
        _redact_file(out)
    return out


def _redact_file(path: Path) -> None:
    """Rewrite an executed notebook without the secrets that it holds, such as one given as a parameter."""
    if path.is_file():
        stored = read_notebook(path)
        if (redacted := redact_values(stored)) != stored:
            files.write(path, (json.dumps(redacted, indent=1, ensure_ascii=False) + "\n").encode("utf-8"))


def run_notebook_suite(
    workspace: Workspace, parameters: Mapping[str, str], on_notebook: Callable[[str, float], None] = lambda *_: None
) -> list[Path]:
    """Run the eight notebooks in order, executed copies under results/notebooks; returns their paths.

    parameters : shared names -> text; each notebook takes those it declares.
    on_notebook : called with name and seconds.
    """
    given = {**parameters, "WORKSPACE": workspace.address}
    written = []
    for name, path in _suite_notebooks().items():
        started = time.perf_counter()
        declared = read_notebook_parameters(path)
        accepted = {key: text for key, text in given.items() if key in declared}
        with progress_phase(name):
            written.append(run_suite_notebook(path, stored_path(workspace.results, "notebooks", path.name), accepted))
        workspace.push()
        on_notebook(name, time.perf_counter() - started)
    return written
