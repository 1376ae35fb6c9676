"""`python -m tests.fuzz`: damage every kind of file that the library reads, and see what reading it does.

--count 400     damaged files in all
--seed 0        text that the damage is drawn with, such as a commit
--only model    kinds whose name holds this text
--json PATH     the table for machines
--known FOLDER  the workspace to damage, kept from an earlier call; made where it is missing
A child process reads the files. A reading may raise a FactoryError, or return what the undamaged file gives (where a
hash protects the file; elsewhere anything). Counted as failures: an end by a signal, another exception, more than 5 s,
more than 500 MB above the idle process, another result.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("linear", "xgboost", "lightgbm", "catboost", "gru")
SECONDS, MEGABYTES = 5, 500
TOKENS = (
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"9" * 4_300,
    b'"../../x"',
    b"\x00",
    b"true",
)
REFUSED = {"refused", "same", "read"}  # outcomes that are no failure


@dataclass(frozen=True)
class Kind:
    """One kind of file: where it lies in the workspace, and how it is read."""

    pattern: str
    read: Callable[[Path], object]
    protected: bool = True  # by a hash: another result is a failure


def digest(value: object) -> str:
    """Hash arrays, tables and plain values."""
    if isinstance(value, dict):
        return digest([[str(key), digest(one)] for key, one in sorted(value.items(), key=lambda item: str(item[0]))])
    if isinstance(value, list | tuple):
        return hashlib.sha256("".join(digest(one) for one in value).encode()).hexdigest()
    if isinstance(value, np.ndarray):
        value = np.ascontiguousarray(value)
        return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
    return hashlib.sha256(repr(value).encode()).hexdigest()


def read_checkpoint(root: Path) -> object:
    from ml_factory.checkpoints.manager import CheckpointManager

    with CheckpointManager(root / "checkpoints", run="fuzz", background=False) as manager:
        return (manager.load_latest_checkpoint("phase") or {}).get("state")


def read_artifact(root: Path, model: str) -> object:
    from ml_factory.storage.artifact_registry import ArtifactRegistry

    artifact = ArtifactRegistry(root / "models").find("DEMO", 5, model)
    return None if artifact is None else predicted(artifact.load_state())


def predicted(state: dict) -> object:
    from ml_factory.inference.bundle import Bundle
    from ml_factory.models.registry import build_model_from_state

    model = build_model_from_state(Bundle.from_state(state).model_state)
    generator = np.random.default_rng(0)
    if hasattr(model, "n_features"):
        return model.predict_proba(generator.normal(size=(64, model.n_features)).astype(np.float32))
    return model.predict_proba(generator.normal(size=(8, 6, model.features)).astype(np.float32))


def read_model_state(root: Path, model: str) -> object:
    """Read a state whose hash is right: only the loader's own checks protect from what is in it."""
    from ml_factory.storage.serialization import deserialize_state

    return predicted(deserialize_state((root / f"{model}.state").read_bytes()))


def read_prepared(root: Path) -> object:
    from ml_factory.workflows.load_prepared import load_dataset

    data = load_dataset(root, "DEMO", 5)
    return [np.asarray(data.x_NF), data.labels.to_numpy(dtype=object).astype(str)]


def read_certificate(root: Path) -> object:
    from ml_factory import pipeline

    return repr(pipeline.certificate(root, "DEMO", 5))


def read_bars(root: Path, name: str) -> object:
    from ml_factory.data.io import import_bars
    from ml_factory.storage.workspace import Workspace

    return import_bars(root / name, Workspace(root / "other"), "MES").fingerprint


def read_settings(root: Path, name: str) -> object:
    from ml_factory.commands.expand_options import _read_table

    return _read_table(root / name)


def read_notebook(root: Path) -> object:
    from ml_factory.notebook_parameters import read_notebook_parameters

    return repr(read_notebook_parameters(root / "a.ipynb"))


KINDS = {
    "checkpoint": Kind("checkpoints/slot-*", read_checkpoint),
    "prepared data": Kind("data/processed/DEMO/**/*", read_prepared),
    "certificate": Kind("data/processed/DEMO/certificates/**/*", read_certificate),
    "notebook": Kind("a.ipynb", read_notebook, protected=False),
}
for _model in MODELS:
    KINDS[f"artifact {_model}"] = Kind(f"models/DEMO/*{_model}*/*", partial(read_artifact, model=_model))
    KINDS[f"model {_model}"] = Kind(f"{_model}.state", partial(read_model_state, model=_model), protected=False)
for _name in ("bars.csv", "bars.csv.gz", "bars.parquet"):
    KINDS[_name] = Kind(_name, partial(read_bars, name=_name), protected=False)
for _name in ("settings.toml", "settings.json"):
    KINDS[_name] = Kind(_name, partial(read_settings, name=_name), protected=False)


def build(root: Path) -> None:
    """Make a workspace with a file of every kind."""
    from ml_factory import pipeline
    from ml_factory.checkpoints.manager import CheckpointManager
    from ml_factory.data.io import load_bars
    from ml_factory.data.synthetic import ensure_synthetic_demo_market
    from ml_factory.storage.artifact_registry import ArtifactRegistry
    from ml_factory.storage.workspace import Workspace

    os.environ["ML_FACTORY_WANDB"] = "off"
    place = Workspace(root)
    ensure_synthetic_demo_market(place, "DEMO", days=8)
    pipeline.prepare(place, "DEMO", (5,))
    for model in MODELS:
        settings = {"epochs": 1, "hidden": 8, "lookback": 6} if model == "gru" else {}
        pipeline.train(place, "DEMO", 5, model, quick=True, model_settings=settings)
        artifact = ArtifactRegistry(place.models).find("DEMO", 5, model)
        (root / f"{model}.state").write_bytes((artifact.path / "state.safetensors").read_bytes())
    with CheckpointManager(place.checkpoints, run="fuzz", background=False) as manager:
        state = {"weights": np.arange(500.0), "epoch": 3, "history": [0.5, 0.4], "names": {"a": "b"}}
        manager.save_checkpoint("phase", state, force=True)
    bars = load_bars(place, "DEMO")[0].head(800).reset_index()
    bars.to_csv(root / "bars.csv", index=False)
    bars.to_csv(root / "bars.csv.gz", index=False)
    bars.to_parquet(root / "bars.parquet", index=False)
    (root / "settings.toml").write_text('symbol = "MES"\nhorizon = 20\n[set]\nepochs = 3\nlearning_rate = 0.01\n')
    (root / "settings.json").write_text('{"symbol": "MES", "horizon": 20, "set": {"epochs": 3}}')
    shutil.copy(ROOT / "colab_notebooks" / "02_train_tabular.ipynb", root / "a.ipynb")


def damaged(data: bytes, generator: np.random.Generator) -> bytes:
    """Return a changed copy of a file's bytes."""
    place, length = int(generator.integers(len(data) + 1)), int(generator.integers(1, 64))
    part = generator.bytes(length)
    token = TOKENS[int(generator.integers(len(TOKENS)))]
    return [
        lambda: data[:place],
        lambda: data[:place] + part + data[place + length :],
        lambda: data[:place] + part + data[place:],
        lambda: data[:place] + data[place + length :],
        lambda: data[:place] + data[max(0, place - length) : place] * 3 + data[place:],
        lambda: data[:place] + bytes(length) + data[place + length :],
        lambda: data[:place] + token + data[place + min(length, 4) :],
        lambda: data[:place] + bytes([data[place % len(data)] ^ (1 << int(generator.integers(8)))]) + data[place + 1 :],
    ][int(generator.integers(8))]()


def cases(count: int, seed: str, only: str) -> list[tuple[str, int]]:
    """Return (kind, number of the damage), every kind as often."""
    kinds = [name for name in KINDS if only in name]
    start = int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16)
    return [(kinds[number % len(kinds)], start + number) for number in range(count)]


def read_all(root: Path, todo: Sequence[tuple[str, int]]) -> None:
    """Damage, read and restore file after file, in the child; a line before and after each reading."""
    known: dict[str, str] = {}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also inside a library
    for position, (name, number) in enumerate(todo):
        kind, generator = KINDS[name], np.random.default_rng(number)
        if name not in known:
            known[name] = digest(kind.read(root))
        files = sorted(path for path in root.glob(kind.pattern) if path.is_file() and path.stat().st_size)
        path = files[int(generator.integers(len(files)))]
        whole = path.read_bytes()
        print("reading", position, name, path.relative_to(root), flush=True)
        path.write_bytes(damaged(whole, generator))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.alarm(SECONDS)
        try:
            outcome = outcome_of(kind, root, known[name])
        finally:
            signal.alarm(0)
            path.write_bytes(whole)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print("done", position, outcome if grown < MEGABYTES else f"memory {grown:.0f} MB", flush=True)


def outcome_of(kind: Kind, root: Path, known: str) -> str:
    from ml_factory.errors import FactoryError

    try:
        result = kind.read(root)
    except FactoryError:
        return "refused"
    except Exception as error:  # noqa: BLE001 (what a user would see as a traceback)
        return f"traceback {type(error).__name__}: {str(error)[:120]}"
    if result is None:
        return "refused"
    return "read" if not kind.protected else "same" if digest(result) == known else "wrong"


def run(root: Path, todo: list[tuple[str, int]]) -> list[tuple[str, str, str]]:
    """Read all in children; return (kind, outcome, file) of each."""
    results, start = [], 0
    while start < len(todo):
        with tempfile.TemporaryDirectory() as folder:
            place = Path(shutil.copytree(root, Path(folder) / "workspace"))
            environment = {**os.environ, "ML_FACTORY_WANDB": "off", "XDG_CACHE_HOME": str(Path(folder) / "cache")}
            done = subprocess.run(
                [sys.executable, "-m", "tests.fuzz", "--child", str(place)], cwd=ROOT, env=environment,
                input=json.dumps(todo[start:]), capture_output=True, text=True, check=False,
            )  # fmt: skip
        lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith(("reading ", "done "))]
        ends = {int(line[1]): line[2] for line in lines if line[0] == "done"}
        begun = {int(line[1]): line[2] for line in lines if line[0] == "reading"}
        if not begun:
            raise SystemExit(done.stderr[-3000:])
        last = max(begun)
        died = "hang" if done.returncode == -signal.SIGALRM else f"signal {-done.returncode}"
        for position in range(last + 1):
            name = todo[start + position][0]
            results.append((name, ends.get(position, died), begun[position].removeprefix(f"{name} ")))
        start += last + 1
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.child:
        read_all(given.child, json.load(sys.stdin))
        return 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = given.known or Path(folder) / "workspace"
        if not root.exists():
            build(root)
        results = run(root, cases(given.count, given.seed, given.only))
    table = Counter((name, outcome.split(" ")[0]) for name, outcome, _ in results)
    for name in dict.fromkeys(name for name, _, _ in results):
        print(
            f"{name:<22}", ", ".join(f"{count} {one}" for (kind, one), count in sorted(table.items()) if kind == name)
        )
    failures = [one for one in results if one[1] not in REFUSED]
    for failure in failures[:40]:
        print("FAILED", *failure)
    print(f"{len(results)} damaged files, {len(failures)} failures, {time.perf_counter() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
