"""What every test may ask for."""

import shutil
import sys
from pathlib import Path

import pytest

import ml_factory  # noqa: F401 - first, so that its OpenMP setting holds for every library
from ml_factory.runs import courier
from ml_factory.runs.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that two workers end together; otherwise the order stays."""
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
    """The root of a workspace with a week of the made-up market, prepared for 5 bars ahead. Never written to."""
    from ml_factory import pipeline  # here, since most tests never need it and it takes seconds
    from ml_factory.data.synthetic import ensure_demo_market

    place = Workspace(tmp_path_factory.mktemp("prepared") / "workspace")
    ensure_demo_market(place, "DEMO", days=8)
    pipeline.prepare(place, "DEMO", (5,))
    return place.root


@pytest.fixture(autouse=True)
def unmirrored(monkeypatch):
    """Nothing is mirrored anywhere, unless a test asks for it."""
    monkeypatch.setenv("ML_FACTORY_WANDB", "off")


@pytest.fixture
def prepared(prepared_template, tmp_path, monkeypatch) -> Workspace:
    """A copy of that workspace, for one test to write into."""
    for name in ("ML_FACTORY_QUICK", "ML_FACTORY_SAVE_MINUTES"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(prepared_template, tmp_path / "workspace")
    return Workspace(tmp_path / "workspace")


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch):
    """What one test leaves on this machine's disk keeps no other from stopping safely."""
    monkeypatch.setattr(courier, "_left", {})


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
        said = capsys.readouterr()
        return code, said.out, said.err

    return go
