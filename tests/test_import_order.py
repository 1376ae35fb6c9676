"""Reading order = data order = import order, for every file, from the syntax tree; and each dependency's home."""

import ast
import re
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
hardware process_identity redaction errors background_thread seeding lazy_module compile_times progress
heartbeat storage.worker_process storage.mounts storage.private_folder storage.scratch_folder numba_cache
storage.atomic_replace storage.json_values storage.regular_files storage.folder_removal storage.mirror_removals
storage.files storage.stored_paths
storage.locks storage.safetensors_header storage.safetensors_layout storage.serialization storage.bucket_sync
storage.workspace storage.pending_uploads storage.artifact_registry
checkpoints.disk checkpoints.staging_buffer checkpoints.session_lifetimes checkpoints.schedule
checkpoints.session_planner checkpoints.compute_session checkpoints.slot_description checkpoints.file_format
checkpoints.slot_pool
checkpoints.leases checkpoints.slots checkpoints.mirrored_leases checkpoints.child_slots checkpoints.save_writer
checkpoints.uploader checkpoints.store
checkpoints.safe_stop checkpoints.stop_signals checkpoints.phase checkpoints.latest_training checkpoints.manager
tracking.run_log tracking.log_merge tracking.log_upload tracking.wandb_process tracking.run_snapshot
tracking.wandb_sync tracking.tracker tracking.wandb_restore
argument_checks code_fingerprint
data.holidays data.sessions data.bar_report data.prefix_hash data.parsing data.price_anomalies data.gaps
data.time_zone_check
data.level_shifts data.quality data.contract_codes data.rolls data.bar_columns data.validation
data.bad_rows
data.bar_files data.io data.synthetic data.resample_kernels data.resample data.bar_stream
data.databases.address data.databases.columns data.databases.table_summary data.databases.row_hash
data.databases.export_parts data.databases.exported_file data.databases.postgres_session data.databases.postgres
data.databases.questdb
features.vector_log features.rolling features.ewm features.rolling_std_slope features.engine features.momentum
features.volatility features.volume features.microstructure features.entropy features.regime features.wavelet
features.fractional features.calendar features.multi_timeframe features.clone_function features.custom
features.build features.stream
targets.barrier_kernels targets.label_table targets.labels targets.fixed_horizon targets.trend_scanning
targets.meta_labels targets.primary_rule targets.make_labels targets.barrier_search_spec targets.barrier_search
targets.weights targets.splits targets.label_sufficiency targets.walk_forward
targets.combinatorial_cv
datasets.scaling datasets.fitted_transforms
datasets.feature_selection datasets.preprocessing
datasets.row_selection datasets.store_parts datasets.memmap
datasets.store datasets.store_writer datasets.windows
leakage.timed_tables leakage.perturbations leakage.cut_points leakage.streaming_check
leakage.pipeline_under_test
leakage.prefix_builds leakage.split_and_fit_check leakage.artifact_comparison leakage.independent_baselines
leakage.custom_feature_check leakage.proof_spec leakage.progress_file leakage.proof_result leakage.proof
leakage.certificate
models.base models.session_clock_offset models.tabular_data models.tabular_spec models.lightgbm_trees
models.xgboost_trees models.catboost_trees models.tabular models.tabular_xgboost
models.tabular_lightgbm models.tabular_catboost models.logistic_regression
models.importances models.heads models.layers models.recurrent_layers models.sequence
models.transformer models.tft_layers models.tft models.contract_checks
models.setting_names models.registry
training.spec training.losses training.sampler training.optim training.precision
training.distributed training.network_blocks training.recompiles training.device
training.recompute training.sync_batch_norm training.batches training.state training.evaluate
training.progress_line training.loop
training.estimator training.export_state_dict
evaluation.baselines evaluation.intervals evaluation.deciles evaluation.metrics evaluation.verdict
evaluation.metrics_table evaluation.calibration evaluation.plot_style evaluation.data_plots evaluation.plots
evaluation.attention_plots evaluation.epoch_plots evaluation.class_scores evaluation.class_plots
evaluation.compression_plots
evaluation.html_report evaluation.findings
evaluation.backtest.contracts evaluation.backtest.rules evaluation.backtest.fill_kernel
evaluation.luck evaluation.backtest.metrics evaluation.backtest.simulation
ensemble.out_of_fold ensemble.stacking
settings run_folder
inference.trained_model inference.predict inference.onnx_graph
inference.onnx_trees inference.onnx_quantiles inference.network_graph
inference.onnx_export inference.onnx_models inference.onnx_ensemble inference.onnx_leaves
inference.onnx_threshold_rows inference.onnx_gate
inference.prediction_spec inference.split_times inference.bundle_checks inference.bundle_parts
inference.guard.histograms inference.guard.bar_channels inference.guard.block_martingale inference.guard.reference
inference.model_card inference.bundle inference.stream
inference.guard.settings inference.guard.alarms inference.guard.feature_range inference.guard.jump_windows
inference.guard.bar_checks inference.guard.drift
inference.guard.outcomes inference.guard.fit_reference inference.guard.guarded_stream inference.guard.request_checks
workflows.prepared_dataset workflows.dataset_evaluation workflows.model_findings
workflows.results.summaries
workflows.results.base workflows.results.data workflows.results.models
workflows.unit_checkpoints
workflows.runs.run_status workflows.runs.restore_run workflows.prove workflows.inspect_data
workflows.load_prepared workflows.audits.audit_artifacts workflows.barriers.barrier_trials
workflows.search_barriers
workflows.barriers.found_barriers workflows.warm_kernels workflows.previous_settings workflows.prepare
workflows.train workflows.train_ranks
workflows.runs.run_options workflows.runs.open_run workflows.cross_validation.fold_schemes
workflows.cross_validation.folds workflows.cross_validation.fold_scores
workflows.cross_validate workflows.runs.stored_runs workflows.predictions workflows.compare_models workflows.backtest
workflows.leaderboard workflows.explain workflows.build_bundle
workflows.export
workflows.export_data workflows.training_criteria workflows.stack
workflows.audits.audit_training workflows.audits.audit_models workflows.audit workflows.fit_cost_model
workflows.plan workflows.run_report_sections workflows.report
workflows.evaluate workflows.suite_answer workflows.predict
workflows.superseded_data workflows.clean
interrupt serving.problems serving.schemas serving.tables serving.served_bundle serving.recent_answers serving.feed
serving.follow
serving.service_metrics serving.service serving.app serving.server
tpu.accelerators tpu.settings tpu.gcloud_commands tpu.gcloud_process tpu.slice_state tpu.worker_files tpu.lifecycle
pipeline notebook notebook_panel notebook_parameters notebook_suite doctor cli_output
recipes.torchvision_operators recipes.shard_writer recipes.recipe_run
recipes.language.tokenizers recipes.language.vocabularies recipes.language.text_sources recipes.language.token_rows
recipes.language.causal_lm recipes.language.surrogate_top_tokens recipes.language.ngram
recipes.sdce recipes.sdce_settings recipes.sdce_run
recipes.shards recipes.shard_sources recipes.image_batches recipes.resnet50 recipes.event_file recipes.worker_log
recipes.image_training
recipes.language.labelled_text recipes.language.unigram_tokenizer recipes.language.length_buckets
recipes.language.text_baselines recipes.memory_plan recipes.t5 recipes.t5_run
recipes.compression.variant_file recipes.compression.subject recipes.compression.pruning
recipes.compression.t5_subject recipes.compression.resnet_subject recipes.compression.market_subject
recipes.compress_run
commands.dataclass_options commands.own_modules commands.options commands.data commands.training
commands.notebooks commands.serving commands.machine commands.tpu commands.recipe_shards commands.recipe_sdce
commands.recipe_resnet50 commands.recipe_t5 commands.recipe_compress commands.recipes
__main__
"""
MAP = MAP_TEXT.split()

# dependency -> the only files that may import it
HOMES = {
    "torch_xla": {"training.device", "models.recurrent_layers"},
    "wandb": {"tracking.tracker"},
    "gcsfs": {"storage.bucket_sync"},
    "matplotlib": {
        "evaluation.plot_style",
        "evaluation.data_plots",
        "evaluation.plots",
        "evaluation.attention_plots",
        "evaluation.epoch_plots",
        "evaluation.class_plots",
        "evaluation.compression_plots",
        "evaluation.html_report",
        "notebook",
    },
    "ipywidgets": {"notebook_panel"},
    "IPython": {"heartbeat", "notebook", "notebook_panel", "notebook_parameters"},
    "papermill": {"notebook_suite"},
    "onnx": {"inference.onnx_graph", "inference.onnx_trees", "inference.onnx_ensemble"},
    "onnxruntime": {"inference.onnx_models"},
    "optuna": {"targets.barrier_search"},
    "fastapi": {"serving.problems", "serving.app"},
    "uvicorn": {"serving.server"},
    "prometheus_client": {"serving.service_metrics"},
    "adbc_driver_postgresql": {"data.databases.postgres"},
}
IMPORTERS = ("import_module", "import_module_or_explain", "LazyModule")  # functions that import by name
ONLY_IN_RECIPES = ("transformers", "tokenizers", "datasets", "webdataset", "torchvision")
# A recipe adds data, a network and a loss: these belong to the loop, its devices and its checkpoints.
NOT_IN_RECIPES = (
    "torch.optim", "torch_xla", "ml_factory.training.optim", "ml_factory.checkpoints.store",
    "ml_factory.checkpoints.slots", "ml_factory.checkpoints.file_format", "ml_factory.checkpoints.save_writer",
)  # fmt: skip
TORCH_STARTS_AT = "datasets.windows"
TORCH_ON_DEMAND = {
    "storage.serialization"
}  # gives tensors back as tensors, and loads torch only when a state holds one
HEAVY = ("torch", "xgboost", "lightgbm", "catboost", "sklearn", "numba", "pandas", "matplotlib", "wandb", "IPython")


def files() -> dict[str, Path]:
    """Short dotted name -> file, for every file of the package that is not an empty room's front door."""
    found = {path.relative_to(PACKAGE).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    return {".".join(name.parts): path for name, path in found.items() if name.name != "__init__"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever it stands, also by importlib or LazyModule."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, item.name) for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            base = (start + (node.module or "")).rstrip(".")
            for item in node.names:
                whole = f"{base}.{item.name}"
                yield node.lineno, whole if is_module(whole) or whole in NOT_IN_RECIPES else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IMPORTERS):
            yield from ((node.lineno, name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def is_module(dotted: str) -> bool:
    stem = ROOT.joinpath(*dotted.split("."))
    return stem.with_suffix(".py").is_file() or (stem / "__init__.py").is_file()


def complaints(name: str, path: Path) -> Iterator[str]:
    """What one file imports from below it in the map, or from outside its home."""
    for line, module in imports(path):
        top, _, rest = module.partition(".")
        if name.startswith("recipes.") and any(f"{module}.".startswith(f"{one}.") for one in NOT_IN_RECIPES):
            yield f"{name}:{line} imports {module}, which is the loop's own"
        elif top == "ml_factory" and rest and name != "__main__":
            if rest not in MAP and not (PACKAGE / rest / "__init__.py").is_file():
                yield f"{name}:{line} imports {rest}, which the map does not hold"
            elif rest in MAP and MAP.index(rest) >= MAP.index(name):
                yield f"{name}:{line} imports {rest}, which stands below it"
        elif top in ("utils", "tests"):
            yield f"{name}:{line} imports {top}, which the wheel does not have"
        elif top == "torch" and name not in TORCH_ON_DEMAND and MAP.index(name) < MAP.index(TORCH_STARTS_AT):
            yield f"{name}:{line} imports torch, which starts at {TORCH_STARTS_AT}"
        elif top in ONLY_IN_RECIPES and not name.startswith("recipes."):
            yield f"{name}:{line} imports {top}, whose home is recipes"
        elif top in HOMES and name not in HOMES[top]:
            yield f"{name}:{line} imports {top}, whose home is {sorted(HOMES[top]) or 'outside the package'}"


def test_import_map_lists_every_library_file_once():
    assert len(MAP) == len(set(MAP))
    assert sorted(files()) == sorted(MAP)


LIBRARY = files()


@pytest.mark.parametrize("name", sorted(LIBRARY))
def test_module_imports_follow_map_order_and_dependency_homes(name):
    if name not in MAP:
        pytest.fail(f"{name} has no place on the map")
    assert not list(complaints(name, LIBRARY[name]))


def test_library_files_are_used_by_library_notebooks_or_utils():
    """A file that only tests or benchmarks import is not what a user runs."""
    used = {module.removeprefix("ml_factory.") for path in LIBRARY.values() for _, module in imports(path)}
    others = [*PACKAGE.rglob("*.py"), *(ROOT / "utils").rglob("*.py"), *(ROOT / "colab_notebooks").rglob("*.ipynb")]
    texts = "".join(path.read_text(encoding="utf-8") for path in others)
    dotted = {tuple(found.split(".")[1:]) for found in set(re.findall(r"\bml_factory(?:\.\w+)+", texts))}
    named = {".".join(words[:length]) for words in dotted for length in range(1, len(words) + 1)}
    assert [name for name in MAP if name not in used | named | {"__main__"}] == []


@pytest.fixture(scope="module")
def empty_library(tmp_path_factory) -> Path:
    """The root of a tree in which every file of the map is empty."""
    root = tmp_path_factory.mktemp("library")
    for module in MAP:
        path = root.joinpath("ml_factory", *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("errors", "from ml_factory import seeding"),
        ("data.validation", "from ml_factory.data.io import read_table"),
        ("data.validation", "def late():\n    from ml_factory.pipeline import train\n"),
        ("features.build", "import torch.nn"),
        ("pipeline", "import wandb"),
        ("inference.predict", "import importlib\nimportlib.import_module('matplotlib.figure')"),
        ("data.validation", "later = LazyModule('ml_factory.pipeline')"),
        ("storage.workspace", "from google.colab import drive"),
        ("pipeline", "from utils.colab_setup import setup_colab_environment"),
        ("data.validation", "from .io import read_table"),
        ("training.loop", "import transformers"),
        ("inference.predict", "from torchvision.models import resnet50"),
        ("data.io", "import datasets"),
        ("evaluation.metrics", "import_module_or_explain('webdataset')"),
        ("recipes.shard_writer", "from torch.optim import AdamW"),
        ("recipes.shard_writer", "from torch import optim"),
        ("recipes.shard_writer", "from ml_factory.training.optim import AdamW"),
        ("recipes.shard_writer", "from ml_factory.checkpoints.store import CheckpointStore"),
        ("recipes.shard_writer", "import torch_xla"),
    ],
)
def test_import_check_with_broken_rule_reports_one_complaint(name, source, empty_library, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", empty_library)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", empty_library / "ml_factory")
    broken = empty_library.joinpath("ml_factory", *name.split(".")).with_suffix(".py")
    broken.write_text(source)
    found = list(complaints(name, broken))
    broken.write_text("")
    assert len(found) == 1


def test_import_ml_factory_loads_no_heavy_package():
    ask = f"import sys, ml_factory; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_import_models_registry_loads_no_torch_and_no_booster():
    ask = (
        "import sys; from ml_factory.models.registry import available_models; available_models()\n"
        "print([name for name in ('torch', 'xgboost', 'lightgbm', 'catboost') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_process_that_writes_checkpoints_loads_no_numpy():
    ask = "import sys, ml_factory.checkpoints.child_slots; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
