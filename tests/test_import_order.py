"""Reading order = data order = import order, for every file, from the syntax tree; and each dependency's home."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ml_factory"

# The map of docs/architecture.md from top to bottom. A file imports only from files above it; a new file is placed
# here first.
MAP_TEXT = """
compiled cores keys errors seeding late compilations progress heartbeat
runs.children runs.mount_table runs.placing runs.mounts
runs.storage runs.ownership runs.layout runs.state runs.staging runs.buckets runs.workspace runs.lives runs.programs
runs.timer
runs.planner runs.session runs.containers runs.pool runs.leases runs.slots
runs.mount_io runs.courier runs.signals runs.phases runs.registry runs.trainings runs.checkpoints
runs.records runs.delivery runs.mirror runs.keepsake runs.versions runs.retelling runs.tracking runs.recovery
arguments
data.holidays data.sessions data.findings data.prefixes data.stamps data.numbers data.habits data.gaps data.clock
data.levels data.spikes data.repeats data.ticks data.blemishes data.expiry data.contracts data.bars data.bad_rows
data.continued data.sources data.synthetic data.plain_parquet data.frames
data.resample data.stream data.sampling
features.logarithm features.windows features.recursions features.moments features.engine features.momentum
features.volatility features.volume features.microstructure
features.entropy features.regime features.wavelet features.fractional features.calendar features.multi_timeframe
features.afresh features.custom features.build features.export
features.stream
targets.barriers targets.outcomes targets.labels targets.forward targets.trend_scanning targets.meta_labels
targets.primary targets.kinds
targets.search_spec targets.barrier_search
targets.bootstrap targets.weights
targets.splits targets.sufficiency targets.walk_forward targets.combinatorial
datasets.quantiles datasets.ranks datasets.block_quantiles datasets.scaling datasets.transforms datasets.selection
datasets.preprocessing datasets.rows datasets.parts datasets.mapped datasets.store datasets.writing datasets.beside
datasets.windows
leakage.tables leakage.disturb leakage.cuts leakage.feed leakage.subject leakage.first_sight leakage.fitted
leakage.artefacts leakage.recount leakage.sampled_days leakage.effort leakage.tried leakage.proof leakage.certificate
models.contract models.offset models.tabular_data models.compiled_trees models.tabular models.tabular_xgboost
models.tabular_lightgbm models.tabular_catboost models.linear models.importances
models.products models.heads models.layers models.recurrent models.sequence models.transformer models.gating
models.tft models.frames models.checks models.signature models.settings models.registry
training.spec training.losses training.order training.optim training.averaging training.precision training.processes
training.pages training.watchdog training.device training.recompute training.feed training.run training.step
training.judging training.meter training.loop training.neural training.estimator training.state_dict
training.forecaster
evaluation.baselines evaluation.intervals evaluation.deciles evaluation.metrics evaluation.verdict
evaluation.metrics_view evaluation.calibration evaluation.drawing evaluation.data_figures
evaluation.figures evaluation.explained evaluation.report
ensemble.out_of_fold ensemble.stacking
provenance experiment
inference.bundle inference.predict
units.dataset units.split_times units.summaries units.results units.keeping units.standing units.restoring
units.appending units.proving units.views units.loading units.artefacts units.trials units.searching units.searched
units.kernels units.preparation
units.holdout units.helping units.opening units.schemes units.folds units.fold_scores units.nested
units.forecasts
units.explaining units.exporting units.stacked units.audited_models units.audited_runs units.audited_stack
units.auditing units.warming units.planning units.pages
pipeline bootstrap parameters notebook suite doctor console interrupt
commands.options commands.data commands.training commands.notebooks commands.machine
__main__
"""
MAP = MAP_TEXT.split()

# dependency -> the only files that may import it
HOMES = {
    "torch_xla": {"training.device", "models.recurrent"},
    "google": set(),  # google.colab lives in utils/ alone
    "wandb": {"runs.tracking"},
    "gcsfs": {"runs.buckets"},
    "matplotlib": {
        "evaluation.drawing",
        "evaluation.data_figures",
        "evaluation.figures",
        "evaluation.explained",
        "evaluation.report",
        "notebook",
    },
    "ipywidgets": {"notebook"},
    "IPython": {"heartbeat", "notebook", "parameters"},
    "papermill": {"suite"},
    "optuna": {"targets.barrier_search"},
}
TORCH_STARTS_AT = "datasets.windows"
TORCH_ON_DEMAND = {"runs.state"}  # gives tensors back as tensors, and loads torch only when a state holds one
HEAVY = ("torch", "xgboost", "lightgbm", "catboost", "sklearn", "numba", "pandas", "matplotlib", "wandb", "IPython")


def files() -> dict[str, Path]:
    """Short dotted name -> file, for every file of the package that is not an empty room's front door."""
    found = {path.relative_to(PACKAGE).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts): path for name, path in found.items() if name.name != "__init__"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever it stands, also by importlib or Late with a plain string."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            base = (start + (node.module or "")).rstrip(".")
            for item in node.names:
                whole = f"{base}.{item.name}"
                yield node.lineno, whole if is_module(whole) else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "Late")):
            yield from ((node.lineno, name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def is_module(dotted: str) -> bool:
    stem = ROOT.joinpath(*dotted.split("."))
    return stem.with_suffix(".py").is_file() or (stem / "__init__.py").is_file()


def complaints(name: str, path: Path) -> Iterator[str]:
    """What one file imports from below it in the map, or from outside its home."""
    for line, module in imports(path):
        top, _, rest = module.partition(".")
        if top == "ml_factory" and rest and name != "__main__":
            if rest not in MAP and not (PACKAGE / rest / "__init__.py").is_file():
                yield f"{name}:{line} imports {rest}, which the map does not hold"
            elif rest in MAP and MAP.index(rest) >= MAP.index(name):
                yield f"{name}:{line} imports {rest}, which stands below it"
        elif top in ("utils", "tests"):
            yield f"{name}:{line} imports {top}, which the wheel does not have"
        elif top == "torch" and name not in TORCH_ON_DEMAND and MAP.index(name) < MAP.index(TORCH_STARTS_AT):
            yield f"{name}:{line} imports torch, which starts at {TORCH_STARTS_AT}"
        elif top in HOMES and name not in HOMES[top]:
            yield f"{name}:{line} imports {top}, whose home is {sorted(HOMES[top]) or 'outside the package'}"


def test_every_file_has_its_place_on_the_map():
    assert len(MAP) == len(set(MAP))
    assert sorted(files()) == sorted(MAP)


@pytest.mark.parametrize("name", sorted(files()))
def test_imports_come_from_above_and_dependencies_from_their_homes(name):
    if name not in MAP:
        pytest.fail(f"{name} has no place on the map")
    assert not list(complaints(name, files()[name]))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("errors", "from ml_factory import seeding"),
        ("data.bars", "from ml_factory.data.sources import read_table"),
        ("data.bars", "def late():\n    from ml_factory.pipeline import train\n"),
        ("features.build", "import torch.nn"),
        ("pipeline", "import wandb"),
        ("inference.predict", "import importlib\nimportlib.import_module('matplotlib.figure')"),
        ("data.bars", "later = Late('ml_factory.pipeline')"),
        ("runs.workspace", "from google.colab import drive"),
        ("pipeline", "from utils.colab_setup import setup_colab_environment"),
        ("data.bars", "from .sources import read_table"),
    ],
)
def test_a_broken_rule_is_seen(name, source, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "ml_factory")
    for module in MAP:
        path = tmp_path.joinpath("ml_factory", *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    broken = tmp_path.joinpath("ml_factory", *name.split(".")).with_suffix(".py")
    broken.write_text(source)
    assert len(list(complaints(name, broken))) == 1


def test_importing_the_library_loads_nothing_heavy():
    ask = f"import sys, ml_factory; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_models_registry_loads_no_network_and_no_booster():
    ask = (
        "import sys; from ml_factory.models.registry import available_models; available_models()\n"
        "print([name for name in ('torch', 'xgboost', 'lightgbm', 'catboost') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
