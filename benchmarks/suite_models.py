"""Every model on a slice of real bars, through its notebook and papermill, unlimited (QUICK=False).

    python -m benchmarks.suite_models --data bars.parquet --symbol ES             # the last 60,000 rows, every model
    python -m benchmarks.suite_models --data bars.parquet --symbol ES --models lstm tft --workspace folder

One JSON line a model: log loss on test and validation rows and the class prior's, the gain over the prior with its
95 % interval, wall and CPU seconds of the whole notebook and of the fit, the most memory one of its processes held.
Models that are finished in the workspace are found there: their seconds are then those of finding them, marked so.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
import psutil

from benchmarks.measure import digits, print_json
from ml_factory import pipeline
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]


def slice_into(workspace: Workspace, data: Path, symbol: str, rows: int) -> int:
    """The last `rows` bars of a file as the workspace's raw bars; how many there were."""
    target = workspace.raw / f"{symbol}_1m.parquet"
    if not target.is_file():
        pd.read_parquet(data).iloc[-rows:].to_parquet(target, index=False)
    return len(pd.read_parquet(target, columns=["close"]))


def run_notebook(workspace: Workspace, symbol: str, horizon: int, model: str) -> dict:
    """Run the model's own notebook in a process of its own; what that took, its children's part included."""
    given = {"SYMBOL": symbol, "HORIZON": horizon, "MODEL": model, "WORKSPACE": workspace.root, "QUICK": False}
    notebook = f"{find_model_spec(model).notebook}.ipynb"
    out = workspace.results / "notebooks" / f"{model}.ipynb"
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [word for name, value in given.items() for word in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", notebook, str(out), *words, "-k", "python3", "--no-progress-bar"]
    quiet = {name: value for name, value in os.environ.items() if name != "ML_FACTORY_QUICK"}
    began, before, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0
    with (workspace.results / "notebooks" / f"{model}.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=quiet)
        while process.poll() is None:
            peak = max(peak, most_held(process.pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{model}: papermill stopped; look at {log.name}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "notebook_s": digits(time.perf_counter() - began),
        "cpu_s": digits(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "peak_mb": round(peak / 1e6),
    }


def most_held(pid: int) -> int:
    """Bytes that the largest process of a family holds now."""
    try:
        family = psutil.Process(pid)
        return max(one.memory_info().rss for one in (family, *family.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def verdict(workspace: Workspace, symbol: str, horizon: int, model: str) -> dict:
    """Return the finished model's metrics on test and validation rows."""
    facts = ArtifactRegistry(workspace.models).find(symbol, horizon, model).facts
    found = pipeline.train(workspace, symbol, horizon, model, on_status=lambda _: None)
    if not found.reused or found.limited:
        raise SystemExit(f"{model}: the notebook's run is not the full one")
    shown = {}
    for split in ("test", "validation"):
        table = found.metrics[found.metrics["split"] == split].set_index("name")
        ours, prior = table.loc[model], table.loc["prior"]
        shown |= {
            f"{split}_rows": int(ours["rows"]),
            f"{split}_log_loss": digits(ours["log_loss"], 5),
            f"{split}_prior": digits(prior["log_loss"], 5),
            f"{split}_gain": digits(ours["log_loss_gain"], 3),
            f"{split}_interval": [digits(ours[end], 3) for end in ("gain_low", "gain_high")],
        }
    return shown | {
        "epochs": len(found.history), "best_epoch": found.best_epoch, "fit_s": digits(facts["seconds"]),
        "artifact": found.artifact_hash[:12],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "bars" / "ES_1m.parquet")
    parser.add_argument("--symbol", default="ES")
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--horizon", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=available_models())
    parser.add_argument("--workspace", type=Path, help="a folder to keep; else one that is thrown away")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        workspace = Workspace(chosen.workspace or temporary)
        bars = slice_into(workspace, chosen.data, chosen.symbol, chosen.rows)
        prepared = pipeline.prepare(workspace, chosen.symbol, horizons=(chosen.horizon,))
        what = {"symbol": chosen.symbol, "bars": bars, "rows": prepared.rows, "horizon": chosen.horizon}
        for model in chosen.models:
            before = ArtifactRegistry(workspace.models).find(chosen.symbol, chosen.horizon, model)
            took = run_notebook(workspace, chosen.symbol, chosen.horizon, model)
            shown = verdict(workspace, chosen.symbol, chosen.horizon, model)
            again = {"found_finished": True} if before and before.hash.startswith(shown["artifact"]) else {}
            print_json(bench="suite_models", model=model, **what, **shown, **took, **again)


if __name__ == "__main__":
    main()
