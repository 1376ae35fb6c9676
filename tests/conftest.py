"""What every test may ask for."""

from pathlib import Path

import pytest

import ml_factory  # noqa: F401 - first, so that its OpenMP setting holds for every library

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real market data beside the project; a test that needs it skips, saying so, where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data absent: no folder {folder.name} beside the project")
    return folder
