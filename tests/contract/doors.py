"""What the contract tests need beyond the names that CONTRACTS.md promises; a replacement changes this file alone."""
# ruff: noqa: F401, I001 - what is imported here is what the tests take from here; long lists stand in lines

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

from ml_factory import argument_checks, cli, cli_output, notebook_panel, pipeline
from ml_factory.argument_checks import check_horizon, check_seed, quick_from_environment
from ml_factory.checkpoints import lease
from ml_factory.checkpoints import schedule as compute_session
from ml_factory.storage.checkpoint_file import read_checkpoint, write_checkpoint
from ml_factory.checkpoints.lease import STALE_SECONDS, WATCH_SECONDS, LeaseTakenOverError, PhaseLease
from ml_factory.code_fingerprint import is_user_code, user_code_hash
from ml_factory.commands import recipes as recipe_commands
from ml_factory.commands import machine as serving_commands
from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.bar_report import hash_bars
from ml_factory.data.databases import connections
from ml_factory.data.io import import_bars, load_bars, raw_bar_minutes, write_bars
from ml_factory.data.parsing import infer_bar_minutes
from ml_factory.data.quality import GAP_KINDS, find_gaps
from ml_factory.data.resample import (
    BarStream, ResampledBars, apply_roll_adjustment, asof_rows, resample_bars, segments_between_rolls, to_bar_chunk,
    trading_intervals,
)  # fmt: skip
from ml_factory.data.rolls import RollSpec, build_continuous_contract, parse_contract_code
from ml_factory.data.sessions import (
    DAY_NS, MINUTE_NS, PRICES, TRADING_HOURS, MarketSpec, assign_sessions, exchange_days, resolve_market_spec,
    scheduled_session_days, scheduled_session_pauses,
)  # fmt: skip
from ml_factory.data.synthetic import SyntheticSpec, ensure_synthetic_demo_market, synthetic_bars
from ml_factory.data.validation import RawBarSpec, parse_bars, validate_bars
from ml_factory.datasets.preprocessing import STEPS as PREPROCESSING_STEPS
from ml_factory.datasets.preprocessing import (
    PcaTransform, check_preprocessing_steps, fit_preprocessing_steps, preprocessing_from_dict,
)  # fmt: skip
from ml_factory.datasets.row_selection import mask_rows_with_full_window, sample_contiguous_blocks
from ml_factory.datasets.scaling import (
    IQR_OF_NORMAL, SCALERS, QuantileScaler, RobustScaler, StandardScaler, column_quantiles,
)  # fmt: skip
from ml_factory.datasets.store import CURRENT, DatasetStore
from ml_factory.ensemble.stacking import Stack, equal_weight_probabilities
from ml_factory.evaluation import data_plots, findings, plots, recipe_plots
from ml_factory.evaluation.backtest.contracts import contract_spec
from ml_factory.evaluation.backtest.fill_kernel import EXITS
from ml_factory.evaluation.backtest.simulation import (
    drawdown, session_gains, sharpe_ratio,
)  # fmt: skip
from ml_factory.evaluation.baselines import (
    BASELINES, baseline_trailing_volatility, last_move_baseline_probabilities, prior_baseline_probabilities,
    session_time,
)  # fmt: skip
from ml_factory.evaluation.calibration import (
    Calibration, calibration_by_class, floored_log_probabilities, independent_row_count, reliability_table, softmax,
)  # fmt: skip
from ml_factory.evaluation.findings import Finding
from ml_factory.evaluation.html_report import HtmlSection, render_html_report, write_html_report
from ml_factory.evaluation.intervals import (
    ConfidenceInterval, autocorrelation_length, cosine_standard_error, count_interval_weeks, fold_gain_interval,
    gain_interval, interval_week_numbers, newey_west_standard_error, squared_cosine_weights,
    week_clustered_standard_error,
)  # fmt: skip
from ml_factory.evaluation.metrics import (
    PROBABILITIES, classification_metrics, compute_forecast_metrics, decile_returns, direction_loss_by_class,
    expected_calibration_error, information_coefficient, negative_log_probabilities, row_log_loss,
)  # fmt: skip
from ml_factory.evaluation.plot_style import COLOURS, downsample_line, figure_to_svg
from ml_factory.evaluation.training_criteria import training_criteria_table
from ml_factory.evaluation.verdict import (
    BEATS, DOES_NOT_BEAT, NOT_ENOUGH, ModelVerdict, VerdictGains, describe_missing_classes, model_verdict,
    verdict_gains_of_folds, verdict_gains_of_rows,
)  # fmt: skip
from ml_factory.features import custom, engine, fractional, regime
from ml_factory.features.build import (
    FAMILIES, FIRST_BARS, MEMORY_BARS, FeatureSpec, FeatureStream, build_features, feature_column_names, frame_name,
)  # fmt: skip
from ml_factory.features.calendar import elapsed_session_share
from ml_factory.features.custom import clone_function_without_state
from ml_factory.features.custom import feature
from ml_factory.features.engine import FeatureEngine, column_names, compute_family_columns
from ml_factory.features.entropy import lempel_ziv_phrases, sigma_bins
from ml_factory.features.fractional import fractional_difference_weights, fractional_return_weights
from ml_factory.features.volatility import range_variances
from ml_factory.features.wavelet import SCALES
from ml_factory.features.windows import balance, ratio, window_std, window_sum
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard import Guard, open_minutes
from ml_factory.inference.guard_reference import (
    BINS, ColumnReference, GuardReference, constant_rows, fit_guard_reference,
)  # fmt: skip
from ml_factory.inference.predict import GraphModel, TrainedModel, predict_features
from ml_factory.interrupt import StopSignalFlag, interrupt_message, interruptible
from ml_factory.lazy_module import EXTRAS, LazyModule, import_module_or_explain
from ml_factory.leakage import certificate
from ml_factory.leakage.blind import Split, find_unpurged_rows
from ml_factory.leakage.certificate import (
    Certificate, certificate_path, read_certificate, require_certificate, write_certificate,
)  # fmt: skip
from ml_factory.leakage.custom import check_custom_features, sample_calendar_days
from ml_factory.leakage.cuts import PERTURBATIONS, SAME_TIMES, TRUNCATE, choose_cut_points, perturb_future_bars
from ml_factory.leakage.proof import QUICK, ProofSpec, prove
from ml_factory.leakage.tables import COLUMNS, ROWS, Findings, Leak, Table, compare
from ml_factory.models import registry, tabular
from ml_factory.models.tabular import feature_importance_table
from ml_factory.models.logistic_regression import LogisticRegression
from ml_factory.models.registry import (
    BOOSTERS, build_model_from_state, find_model_spec, model_state_from_checkpoint, register_model,
    registered_model_settings, registered_source_hash, search_space,
)  # fmt: skip
from ml_factory.models.rows import balanced_class_factors
from ml_factory.models.session_clock import PSEUDO_COUNTS, SessionClock, SessionClockOffset, SessionTime, class_shares
from ml_factory.models.setting_names import parse_named_settings, parse_setting_value
from ml_factory.models.tabular import TabularModel, early_stopping_round
from ml_factory.notebook import NOTEBOOKS, draw_finished_notebooks, finish, markets, progress, show
from ml_factory.notebook_panel import CellPanel, LiveCurves, show_machine
from ml_factory.notebook_parameters import (
    PARAMETERS_TITLE, check_parameters, convert_notebook_parameters, parse_notebook_parameters,
    read_notebook_parameters,
)  # fmt: skip
from ml_factory.notebook_suite import run_suite_notebook
from ml_factory.numba_cache import numba_sources_hash, private_folder, set_numba_cache_folder
from ml_factory.progress import (
    Heartbeat, ProgressPhase, format_duration, progress_phase, record_progress, report_progress_to,
)  # fmt: skip
from ml_factory.redaction import LOGGERS, RedactedStream, has_wandb_key, redact_secrets, redact_values
from ml_factory.result import Result
from ml_factory.runs import (
    FitCheckpoints, Run, RunFolder, RunOptions, checkpoint_minutes_from_environment, count_trials, newest_run_folder,
    open_run, open_run_checkpoints, progress_words, run_machine_facts,
)  # fmt: skip
from ml_factory.seeding import derive_seed, seeded_generator
from ml_factory.serving import follow
from ml_factory.serving.feed import KNOWN_BARS, Feed, ServedBundle, kept_bars, to_table
from ml_factory.serving.follow import FollowedFile
from ml_factory.settings import DataSpec, QuickLimits, RunSettings, certified_code_hash, make_run_settings
from ml_factory.storage import mirror
from ml_factory.storage import remote as remotes
from ml_factory.storage import workspace as places
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import LEDGER, REMOVALS, files, is_plain_name, mount_of, stored_path
from ml_factory.storage.json_values import fingerprint_json, parse_json, to_json_value
from ml_factory.storage.locks import acquire_lock_file, file_lock, is_lock_file_held, release_lock_file
from ml_factory.storage.mirror import Mirror, fetch_file
from ml_factory.storage.remote import Bucket, MountedFolder, Remote
from ml_factory.storage.serialization import (
    deserialize_state, pack_state, read_state_file, serialize_state, write_state_file,
)  # fmt: skip
from ml_factory.storage.workspace import Workspace, check_symbol, default_workspace_root
from ml_factory.targets.barrier_kernels import BARRIERS
from ml_factory.targets.barrier_search import (
    BarrierSearchSpec, SearchedLabelSpec, fingerprint_searched_bars, search_barriers_on_training_rows,
)  # fmt: skip
from ml_factory.targets.label_table import SESSION_ENDS, usable_label_rows
from ml_factory.targets.labels import (
    LABEL_KINDS, LabelSpec, check_class_sufficiency, check_horizon_fits_session, label_classes, longest_session_bars,
    triple_barrier_labels, triple_barrier_prices,
)  # fmt: skip
from ml_factory.targets.make_labels import (
    NEUTRAL_BAND, direction_labels, label_lives_to_the_vertical, make_labels, meta_labels, primary_rule_features,
    primary_rule_side, primary_side_of_rows, strongest_trend, trend_scanning_labels,
)  # fmt: skip
from ml_factory.targets.splits import (
    SplitSpec, chronological_split, combinatorial_purged_folds, purge_training_rows, purged_kfold,
    walk_forward_expanding, walk_forward_rolling,
)  # fmt: skip
from ml_factory.targets.weights import average_uniqueness, effective_sample_size, training_weights
from ml_factory.tpu import gcloud
from ml_factory.tpu.gcloud import GcloudError
from ml_factory.tpu.settings import VARIABLES, SliceSettings, read_settings
from ml_factory.tpu.worker_files import worker_script
from ml_factory.tracking import run_log, wandb_process, wandb_restore
from ml_factory.tracking.run_log import SUMMARY, list_log_attempts
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_process import wandb_mirror_mode
from ml_factory.tracking.wandb_restore import replay_log_to_wandb, restore_from_wandb
from ml_factory.tracking.wandb_sync import PROJECT as WANDB_PROJECT
from ml_factory.tracking.wandb_sync import RunSnapshot
from ml_factory.training.spec import TrainSpec
from ml_factory.workflows import audit, evaluation, folds, plan, predictions, search_barriers
from ml_factory.workflows import train as train_module
from ml_factory.workflows.backtest import luck_sentence
from ml_factory.workflows.build import build as build_data
from ml_factory.workflows.cross_validate import (
    fold_gain, fold_score_mean_gain, fold_score_table, labels_of_scored_folds, path_score_table, score_folds,
    verdict_of_fold_scores,
)  # fmt: skip
from ml_factory.workflows.evaluation import (
    best_baseline, dataset_weighted_prior_loss, prepared_dataset_baselines, prepared_dataset_metrics,
)  # fmt: skip
from ml_factory.workflows.export_data import export_data
from ml_factory.workflows.folds import (
    FoldForecasts, FoldModel, FoldPlan, FoldSchemeSpec, fit_folds, inner_validation_split, plan_folds,
)  # fmt: skip
from ml_factory.workflows.plan import RESERVE_SECONDS, FitCost
from ml_factory.workflows.prepare import estimate_prepared_bytes
from ml_factory.workflows.prepared_dataset import (
    PreparedDataset, fit_dataset_preprocessing, load_dataset, resolve_dataset_settings, stored_data_settings,
)  # fmt: skip
from ml_factory.workflows.prove import audit_prepared_files, describe_proof_of_store, find_certificates
from ml_factory.workflows.train import build_untrained_model, check_given_estimator
from tests.small_data import SMALL_DATA, SMALL_DATA_WORDS

if importlib.util.find_spec("torch"):  # `make matrix` has rows without it
    from ml_factory.datasets.windows import Windows
    from ml_factory.inference import onnx as onnx_export
    from ml_factory.inference.onnx import check_onnx_graph, model_to_onnx
    from ml_factory.models import sequence as recurrent_layers
    from ml_factory.models.sequence import GRU, LSTM, TCN, RecurrentSpec, TCNSpec
    from ml_factory.models.tft import (
        EPS, TFT, GatedResidualNetwork, InterpretableMultiHeadAttention, TFTSpec, VariableSelectionNetwork,
    )  # fmt: skip
    from ml_factory.models.transformer import PatchTST, PatchTSTSpec, TokenDropout, dot_product_attention, instance_norm
    from ml_factory.recipes import resnet50, sdce, sdce_run, surrogate, t5
    from ml_factory.recipes import shards as shards_file
    from ml_factory.recipes import language_models as text_module
    from ml_factory.recipes.compress import prune_t5_state, run_compress
    from ml_factory.recipes.compress import summary as compression_summary
    from ml_factory.recipes.images import ImageBatches, ShardSamples
    from ml_factory.recipes.labelled_text import (
        check_parts, describe, made_up_texts, overview, read_labelled_texts, split_by_blocks, unseen_rows,
    )  # fmt: skip
    from ml_factory.recipes.language_models import byte_tokenizer, load_causal_model
    from ml_factory.recipes.resnet50 import build_resnet50, train_resnet50
    from ml_factory.recipes.run import agree_on_run, is_writing_process, root_of_output, tpu_host
    from ml_factory.recipes.sdce_run import SdceSettings, batch_arithmetic, ngram_losses, sdce_settings, summary
    from ml_factory.recipes.shards import array_samples, folder_samples, write_shards
    from ml_factory.recipes.shards import find_shards
    from ml_factory.recipes.surrogate import (
        SurrogateTopTokens, VocabularyJoin, cache_top_tokens, join_vocabularies, token_contents,
    )  # fmt: skip
    from ml_factory.recipes.language_models import TextSource, open_text, pack_tokens
    from ml_factory.recipes.worker_log import WorkerLog
    from ml_factory.training.batches import BatchLoader
    from ml_factory.training.device import (
        Device, XlaDevice, deterministic_device, drawn_from, pick_device, pick_prediction_device,
    )  # fmt: skip
    from ml_factory.training.distributed import ProcessGroup
    from ml_factory.training.estimator import NeuralClassifier, zero_output_head
    from ml_factory.training.batches import evaluate_mean_loss, evaluate_network_outputs
    from ml_factory.training.estimator import NetworkWithClockOffset
    from ml_factory.training.loop import TrainingReports, Validation, run_training_loop, take_training_step
    from ml_factory.training.batches import weighted_cross_entropy
    from ml_factory.training.optim import (
        AdamW, optimizer_step_scalars, total_gradient_norm, warmup_cosine_learning_rate,
    )  # fmt: skip
    from ml_factory.training.optim import FIRST_SCALE, LEAST_SCALE, STEPS_TO_GROW, LossScaler
    from ml_factory.training.sampler import BatchSampler, StreamSampler, micro_batch_size
    from ml_factory.training.state import TrainingState, recompute_blocks
    from ml_factory.training.distributed import SyncBatchNorm2d

if importlib.util.find_spec("fastapi"):
    from ml_factory.serving.app import KEY_VARIABLE, build_app, check_service_address, parse_api_key
    from ml_factory.serving.schemas import PredictRequest

device, sampler, loop = (LazyModule(f"ml_factory.training.{name}") for name in ("device", "state", "loop"))
CALENDARS = tuple(TRADING_HOURS)
SETTINGS = (FeatureSpec, LabelSpec, RawBarSpec, RollSpec, SplitSpec, SyntheticSpec)


def calendar_market(calendar: str, volume: bool = True, days: int = 9) -> tuple[pd.DataFrame, MarketSpec]:
    """One-minute bars of a synthetic market over a change of the clocks, with holes, and its facts."""
    bars = synthetic_bars(days=days, seed=4, calendar=calendar, start="2024-03-05", missing=0.01)
    gone = np.zeros(len(bars), bool)
    for share, minutes in ((0.45, 100), (0.7, 25), (0.85, 8)):
        gone[int(len(bars) * share) :][:minutes] = True
    bars = bars[~gone]
    market = MarketSpec("DEMO", calendar, 0.25, volume)
    return bars if volume else bars.drop(columns="volume"), market


def feature_rows(bars: pd.DataFrame, market: MarketSpec, families: tuple[str, ...], frames: tuple[int, ...] = (15,)):
    """known_at int64[N], values [N, F] float32 and the F names of the matrix of these families."""
    matrix = build_features(bars, market, FeatureSpec(frames=frames, families=families))
    return matrix.known_at, matrix.values, matrix.names


def streamed_rows(
    bars: pd.DataFrame, market: MarketSpec, families: tuple[str, ...], cuts: list[int], restored: set[int]
):
    """known_at and values of the same matrix, pushed in chunks that end at `cuts`; saved and restored before some."""
    spec = FeatureSpec(frames=(15,), families=families)
    stream, rows = FeatureStream(market, spec), []
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(bars)], strict=True)):
        if number in restored:
            state, stream = stream.get_state(), FeatureStream(market, spec)
            stream.load_state(state)
        rows.append(stream.push(bars.iloc[begin:end]))
    return np.concatenate([one.known_at for one in rows]), np.concatenate([one.values for one in rows])


@contextmanager
def own_features() -> Iterator[None]:
    """Forget the user's own features that are registered inside."""
    before = dict(custom._FEATURES)
    try:
        yield
    finally:
        custom._FEATURES.clear()
        custom._FEATURES.update(before)


def forget_wandb_warnings() -> None:
    """Let each warning about W&B be given once more."""
    wandb_process._warned.clear()


@contextmanager
def no_features() -> Iterator[None]:
    """No feature of the user is registered inside."""
    with own_features():
        custom._FEATURES.clear()
        yield


def unproven_feature(function: Callable, memory: int) -> None:
    """Register a feature whose look ahead its registration does not see."""
    right, custom.prove_custom_feature = custom.prove_custom_feature, lambda *given: None
    try:
        feature(function, memory=memory)
    finally:
        custom.prove_custom_feature = right


@contextmanager
def own_models() -> Iterator[None]:
    """Forget the user's own models that are registered inside."""
    before = dict(registry._SPECS)
    try:
        yield
    finally:
        registry._SPECS.clear()
        registry._SPECS.update(before)


def families_with_columns(market: MarketSpec) -> tuple[str, ...]:
    """The registered families that have columns in this market."""
    return tuple(name for name, family in FAMILIES.items() if column_names(family, market, False))


def write_bundle(bundle: Bundle, path: Path) -> Path:
    """Write a bundle to a file."""
    path.write_bytes(bundle.to_bytes())
    return path


def verbs() -> list[str]:
    """The verbs of the command line."""
    return [name for name in cli.app if not name.startswith("-")]


def verb_example(verb: str) -> str:
    """What follows the verb in the example of its help."""
    one = cli.app[verb]
    told = one.help or one.default_command.__doc__
    return re.findall(rf"`python -m ml_factory {verb}\b ?(.*?)`", told)[0]


def certificate_text(root: Path) -> str:
    """What the certificate of DEMO, horizon 5, says."""
    return repr(pipeline.certificate(root, "DEMO", 5))


def scaled_rows(root: Path, symbol: str, horizon: int) -> np.ndarray:
    """The rows as a model sees them, by the stored scaler."""
    return np.asarray(load_dataset(root, symbol, horizon).x_NF)


# ---- what is fitted --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitTable:
    """Rows to fit on and to apply to: features, labels, weights, times, probabilities of a model, last moves."""

    x_NF: np.ndarray
    y: np.ndarray
    w: np.ndarray
    known_at: np.ndarray
    p_N3: np.ndarray
    move: np.ndarray

    def first(self, count: int) -> "FitTable":
        """The first rows alone."""
        return FitTable(*(value[:count] for value in vars(self).values()))


@dataclass(frozen=True)
class FittedPart:
    """fit(table, rows) -> part; apply(part, table) -> an array, a row for each; state and restore: plain JSON."""

    fit: Callable
    apply: Callable
    state: Callable
    restore: Callable


def _preprocessing(name: str) -> FittedPart:
    steps = (name,) if name in SCALERS else (name, "robust")

    def fit(table: FitTable, rows: np.ndarray):
        return fit_preprocessing_steps(steps, table.x_NF, rows)

    return FittedPart(
        fit, lambda part, table: part.transform(table.x_NF), lambda part: part.to_dict(), preprocessing_from_dict
    )


def _clock(volatility: bool) -> FittedPart:
    def fit(table: FitTable, rows: np.ndarray) -> SessionClock:
        clock, moves = session_time(table.known_at, "cme").take(rows), table.move[rows]
        return SessionClock.fit(
            clock, table.y[rows], horizon=5, bar_minutes=5.0, volatility=moves if volatility else None
        )

    def apply(part: SessionClock, table: FitTable) -> np.ndarray:
        return part.predict(session_time(table.known_at, "cme"), table.move if volatility else None)

    return FittedPart(fit, apply, lambda part: part.to_dict(), SessionClock.from_dict)


FITTED = {name: _preprocessing(name) for name in PREPROCESSING_STEPS} | {
    "clock": _clock(volatility=False),
    "clock_volatility": _clock(volatility=True),
    "calibration": FittedPart(
        lambda table, rows: Calibration.fit(floored_log_probabilities(table.p_N3[rows]), table.y[rows], horizon=5),
        lambda part, table: part.apply(table.p_N3), lambda part: part.to_dict(), Calibration.from_dict,
    ),
}  # fmt: skip


# ---- sabotage --------------------------------------------------------------------------------------------------------


def _next_seed(module: ModuleType, part: str) -> tuple[ModuleType, str, Callable]:
    """`derive_seed` of a module, one further for this part."""
    right = module.derive_seed

    def wrong(*parts, **more):
        return right(*((*parts[:-1], parts[-1] + 1) if part in parts else parts), **more)

    return module, "derive_seed", wrong


def _death_at(module: ModuleType, part: str, at: int) -> tuple[ModuleType, str, Callable]:
    """`derive_seed` of a module, that raises KeyboardInterrupt for number `at` of this part."""
    right = module.derive_seed

    def dies(*parts, **more):
        if part in parts and parts[-1] == at:
            raise KeyboardInterrupt
        return right(*parts, **more)

    return module, "derive_seed", dies


def _sabotages(name: str) -> tuple[object, str, Callable]:
    """What is broken of what, and the broken form."""
    take, rate, seed = sampler.BatchSampler.positions, loop.warmup_cosine_learning_rate, device.Device.seed_step
    return {
        "position of the sampler": lambda: (
            sampler.BatchSampler, "positions", lambda order, step: take(order, step + 1),
        ),
        "learning rate": lambda: (
            import_module_or_explain(loop.__name__), "warmup_cosine_learning_rate",
            lambda step, *rest: rate(max(step - 1, 0), *rest),
        ),
        "random numbers of the device": lambda: (
            device.Device, "seed_step", lambda one, number: seed(one, number + 1),
        ),
        "seed of a block": lambda: _next_seed(tabular, "block"),
        "seed of a fold": lambda: _next_seed(folds, "fold"),
        "death before the second fold": lambda: _death_at(folds, "fold", 1),
    }[name.partition(",")[0]]()  # fmt: skip


@contextmanager
def sabotage(name: str) -> Iterator[None]:
    """Break the library on purpose inside: the only patches of this folder."""
    owner, attribute, broken = _sabotages(name)
    right = getattr(owner, attribute)
    setattr(owner, attribute, broken)
    try:
        yield
    finally:
        setattr(owner, attribute, right)
