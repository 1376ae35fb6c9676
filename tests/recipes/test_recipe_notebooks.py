"""The recipes' notebooks, executed: what they claim about a real database, a bundle and a CPU holds in the end."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.storage.workspace import Workspace
from tests.data.postgres_server import missing_postgres_programs, postgres_server
from tests.notebook_lint import FOLDER, ROOT

pytestmark = [pytest.mark.notebooks, pytest.mark.slow]


def executed(name: str, folder: Path, *words: str, **environment: str) -> str:
    """Run a notebook with QUICK through papermill; return what its cells printed."""
    done = subprocess.run(
        [sys.executable, "-m", "papermill", FOLDER / "recipes" / f"{name}.ipynb", folder / "done.ipynb",
         "--no-progress-bar", "-p", "WORKSPACE", str(folder / "workspace"), *words],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "ML_FACTORY_QUICK": "1", "ML_FACTORY_WANDB": "off", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in nbformat.read(folder / "done.ipynb", 4).cells if cell.cell_type == "code"]
    return "".join("".join(one.get("text", "")) for cell in cells for one in cell.outputs)


@pytest.fixture
def database(tmp_path):
    """The address of a database with a few days of the synthetic market, called MES there."""
    if missing := missing_postgres_programs():
        pytest.skip(f"no PostgreSQL server on this machine: {', '.join(missing)} not found")
    made = Workspace(tmp_path / "made")
    ensure_synthetic_demo_market(made, "DEMO", days=12)
    bars = pd.read_parquet(made.raw_bars("DEMO"))
    names = ["timestamp", "open", "high", "low", "close", "volume"]
    rows = bars[names].to_csv(index=False, header=False)
    with postgres_server() as server:
        server.run_sql(
            "CREATE TABLE minute_bars (symbol text DEFAULT 'MES', timestamp timestamptz, open float8, high float8, "
            "low float8, close float8, volume float8); "
            f"COPY minute_bars ({', '.join(names)}) FROM STDIN CSV;\n{rows}\\.\n"
        )
        yield server.source(), len(bars)


def test_migration_notebook_goes_from_database_to_bundle_on_cpu(database, tmp_path):
    source, rows = database
    printed = executed("tpu_migration", tmp_path, "-p", "SYMBOL", "MES", DATABASE_URL=source)
    assert f"{rows:,} rows from postgresql://" in printed and "equal to the database in rows" in printed
    assert "bundle and pipeline under 1e-5: True" in printed and "tester" not in printed
    written = Path(tmp_path / "workspace" / "data" / "MES.parquet")
    assert written.is_file() and written.with_name("MES.parquet.json").is_file()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("resnet50", "accuracies between 0 and 1: True"),
        ("t5", "accuracy between 0 and 1: True"),
        ("sdce", "share of the vocabulary that the surrogate knows: 1.0"),
    ],
)
def test_recipe_notebook_trains_and_writes_what_it_names(name, line, tmp_path):
    printed = executed(name, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert line in printed and "This was the last notebook." in printed
    assert list((tmp_path / "workspace" / "results" / name).glob("*/result.json"))
