"""What every test may ask for."""

import inspect
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import ml_factory  # noqa: F401 - first, so that its OpenMP setting holds for every library
from ml_factory.storage.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark parameters for `make soak`, and put files with slow tests first."""
    for item in items:
        keep = item.get_closest_marker("soak_except")
        if keep is not None and not any(word in item.callspec.id for word in keep.args):
            item.add_marker(pytest.mark.soak)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real market data beside the project; a test that needs it skips, saying so, where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data absent: no folder {folder.name} beside the project")
    return folder


@pytest.fixture(scope="session")
def prepared_template(tmp_path_factory) -> Path:
    """The root of a workspace with a week of the made-up market, prepared in few columns. Never written to."""
    from ml_factory import pipeline  # here, since most tests never need it and it takes seconds
    from ml_factory.data.synthetic import ensure_synthetic_demo_market
    from tests.small_data import SMALL_DATA

    place = Workspace(tmp_path_factory.mktemp("prepared") / "workspace")
    ensure_synthetic_demo_market(place, "DEMO", days=8)
    pipeline.prepare(place, "DEMO", (5,), settings=SMALL_DATA)
    return place.root


class NoFigures:
    """Stands in for a module of figures: whatever it is to draw is None, of arguments that its function takes."""

    def __init__(self, module: ModuleType):
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., None]:
        taken = inspect.signature(getattr(self.module, name))

        def undrawn(*given, **named) -> None:
            taken.bind(*given, **named)

        return undrawn


@pytest.fixture(scope="session", autouse=True)
def undrawn() -> Iterator[list[tuple]]:
    """Leave out most seconds of a small training and of a small proof.

    Reports hold no figures, unless a test asks for `drawn`; a backtest trades 5 shifts of the forecasts, not 20; the
    quick proof cuts and feeds a few times, and the small trainings of an audit read fewer rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        figures = []
        if find_spec("matplotlib"):
            names = ("report", "backtest", "prepare", "audit")
            report, backtest, prepare, audit = (import_module(f"ml_factory.workflows.{name}") for name in names)
            style = import_module("ml_factory.evaluation.plot_style")
            figures = [(report, "plots", report.plots), (style, "figure_to_svg", style.figure_to_svg)]
            patch.setattr(report, "plots", NoFigures(report.plots))
            patch.setattr(style, "figure_to_svg", lambda figure, name: "<svg></svg>")
            patch.setattr(backtest, "SHIFTS", 5)
            few = {"feed_pushes": min(15, prepare.QUICK.feed_pushes), "cuts": min(6, prepare.QUICK.cuts)}
            patch.setattr(prepare, "QUICK", replace(prepare.QUICK, **few))
            pushes = min(100, audit.ProofSpec.feed_pushes)
            patch.setattr(audit, "ProofSpec", partial(audit.ProofSpec, feed_pushes=pushes))
            patch.setattr(audit, "SAMPLE_ROWS", {"tabular": 1_000, "network": 500})
        yield figures


@pytest.fixture
def drawn(undrawn, monkeypatch):
    """Reports hold their figures."""
    for figure in undrawn:
        monkeypatch.setattr(*figure)


@pytest.fixture(scope="session")
def every_cut(undrawn) -> Callable[[], AbstractContextManager]:
    """`with every_cut():` the quick proof cuts as often as a user's."""

    @contextmanager
    def full() -> Iterator[None]:
        prepare, proof = import_module("ml_factory.workflows.prepare"), import_module("ml_factory.leakage.proof")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepare, "QUICK", replace(prepare.QUICK, cuts=proof.QUICK.cuts))
            yield

    return full


@pytest.fixture(scope="session", autouse=True)
def unmirrored() -> Iterator[None]:
    """Nothing is mirrored anywhere, also by what fixtures of a module start, unless a test asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ML_FACTORY_WANDB", "off")
        yield


@pytest.fixture
def prepared(prepared_template, tmp_path, monkeypatch) -> Workspace:
    """A copy of that workspace, for one test to write into."""
    for name in ("ML_FACTORY_QUICK", "ML_FACTORY_SAVE_MINUTES"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(prepared_template, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def call(capsys, monkeypatch):
    """The command line in this process: call(*words) gives (exit code, standard output, standard error)."""
    from ml_factory import __main__

    def go(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ml_factory", *map(str, words)])
        capsys.readouterr()
        try:
            __main__.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return go


@pytest.fixture
def disk_full_beyond() -> Callable[[int], object]:
    """`with disk_full_beyond(n)`: the operating system refuses to let any file grow past n bytes, in mid-write."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start Python code in a process of its own; whatever still lives at the end of the test is killed."""
    processes = []

    def start(code: str, *arguments: object, **env: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
