"""`auto`: search models and their settings on purged folds of the rows before the test rows, and train the best.

results/{SYMBOL}/auto-…/journal.log       Optuna's journal of the search, JSON lines, which processes may share
results/{SYMBOL}/auto-…/trials.json       the finished trials, each of which counts for luck
"""

import itertools
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import AUTO_MODELS
from ml_factory.checkpoints.schedule import expected_hours_left
from ml_factory.code_fingerprint import source_hash
from ml_factory.errors import (
    CheckpointError,
    FactoryError,
    FileError,
    NonFiniteError,
    SessionOverError,
    SettingsError,
    WorkspaceError,
    did_you_mean,
    refuse_damaged_content,
)
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import describe_differences, merge_inexact_reasons
from ml_factory.models.registry import search_space
from ml_factory.own_modules import import_own_modules
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.runs import (
    TRIALS,
    FitCheckpoints,
    RunOptions,
    newest_run_folder,
    open_run_checkpoints,
    run_machine_facts,
)
from ml_factory.seeding import derive_seed
from ml_factory.settings import RunSettings, make_run_settings
from ml_factory.storage.files import disk_errors, files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.locks import file_lock
from ml_factory.storage.mirror import opened_mirror, push_in_background
from ml_factory.storage.workspace import Workspace, push_workspace_on_exit
from ml_factory.workflows.cross_validate import check_barriers_unsearched, fold_gain, plan_model_folds
from ml_factory.workflows.distribute import begin_task, ended_tasks, joined_cluster
from ml_factory.workflows.folds import FoldModel, FoldSchemeSpec
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset
from ml_factory.workflows.stack import settings_per_model
from ml_factory.workflows.train import load_data_of_run, train_or_load
from ml_factory.workflows.train_ranks import check_single_rank

POLL_SECONDS = 1.0  # between two looks at the last trials of another process
FINISHED_BEFORE_STOPS = 5  # trials, before another one may stop early
_NOT_OF_A_TRIAL = (CheckpointError, SessionOverError, WorkspaceError)  # these errors end the search
optuna, journal = LazyModule("optuna"), LazyModule("optuna.storages.journal")  # they come with the extra auto
ray_library = LazyModule("ray")


@push_workspace_on_exit
def auto(
    workspace: Workspace | str | Path, symbol: str, horizon: int, hours: float | None = None,
    trials: int | None = None, *, models: Sequence[str] = AUTO_MODELS, folds: int = 5,
    model_settings: Mapping[str, Mapping] | None = None, ray: str | None = None,
    own_modules: Sequence[str] = (), **options: Any,
) -> Result:  # fmt: skip
    """Search models and settings by their mean gain over the best baseline on purged folds, and train the best.

    A trial is a cross-validation over the rows before the test rows; only the training of the best one reads these.
    A search continues where it was interrupted, and several processes may share it where the workspace is a folder of
    theirs, not in a bucket or on a mount; else one process owns it. A trial that fails is recorded, and the search
    continues.

    hours : time of this call; where the search ends then depends on the machine.
    trials : trials of the search in all, those of earlier calls among them. Either hours or trials is given.
    models : those searched; the first trial of each has its defaults.
    folds : number of purged folds. A trial whose mean gain after two or more is below the others' median stops there.
    model_settings : model -> settings that are not searched, and the same in all its trials.
    ray : address of a cluster, whose cores search together, or "local": a process for each core of this machine. The
        workspace is a folder that all machines share, not in a bucket. None: this process alone.
    own_modules : modules, or .py files, of your own features and networks, for the processes on Ray.
    options : as of `train`, without `source` and `run`.

    The result has

    trials : a row per finished trial: trial, model, state (complete, pruned or failed), folds, gain in nats a row,
        settings, reason of a failure.
    best : the row of the best complete trial; beats: its gain is above 0.
    command : of the training of the best, with its verdict and trained_run_id; None where nothing beats the baselines:
        no test row was read then.
    exact : False where hours, several processes on Ray, or a fit make the end depend on the machine; inexact_because
        has the reasons.

    Raises SettingsError, NotPreparedError, FactoryError.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    check_single_rank("auto")
    limits = {name: value for name, value in (("hours", hours), ("trials", trials)) if value is not None}
    legal = [isinstance(value, int | float) and 0 < value < math.inf for value in limits.values()]
    if legal != [True] or not isinstance(trials, int | None):
        raise SettingsError(
            "A search ends after a number of trials, or after hours", where="trials, hours", got=limits or "neither",
            wanted="one of them, above 0", next_step="give --trials 40, or --hours 2",
        )  # fmt: skip
    if not models:
        raise SettingsError("There is no model to search", where="models", got=repr(models),
                            next_step=did_you_mean("", AUTO_MODELS))  # fmt: skip
    chosen = RunOptions.of(options, unused=("source", "run"))
    import_own_modules(own_modules)
    given = settings_per_model(models, {name: {} for name in models} | dict(model_settings or {}))
    data = load_data_of_run(workspace, symbol, horizon, chosen)
    check_barriers_unsearched(data)
    study = _Study(workspace, data, given, FoldSchemeSpec(folds=folds), chosen)
    limit = min(hours, expected_hours_left()) * 3600 if hours else math.inf
    if known := len(study.finished()):
        chosen.on_status(
            f"Found auto on {symbol}, horizon {horizon}: {known} trials finished ({study.run_id}). Resumes from there."
        )
    with study.checkpoints:
        if ray is None:
            study.search(trials, limit)
        else:
            study.search_on_ray(ray, workspace, own_modules, trials, limit)
    table, path = study.finished(trials), study.folder / TRIALS
    complete = [one for one in table if one["state"] == "complete"]
    if table and not complete:
        raise FactoryError("Every trial failed", where=path, got=table[-1]["reason"],
                           next_step="give other settings; FRESH begins another search")  # fmt: skip
    if not complete:
        raise FactoryError("No trial ended in this time", where=path, next_step="give more hours: it continues")
    best, trained, command = max(complete, key=lambda one: one["gain"]), None, None  # of equals the first
    ending = ["Nothing beats the time of the session, or another baseline. Nothing was trained, no test row was read."]
    if best["gain"] > 0:
        command = _train_command(workspace, data, best, chosen)
        chosen.on_status(f"Trains the best of {len(table)} trials: {command}")
        began = time.perf_counter()
        with file_lock(study.folder / "training.lock"):  # the other processes load what the first one trains
            training = train_or_load(
                workspace, symbol, horizon, best["model"], (), best["settings"], None, replace(chosen, fresh=False)
            )
            trained = training.reported(began)
        ending = [f"  {command}", *(trained.summary().splitlines() if trained else ())]
    because = [name for name, one in (("hours", hours), ("ray", ray)) if one is not None] + study.inexact()
    seconds = time.perf_counter() - started
    lines = [
        f"auto on {symbol}, horizon {horizon}: {len(table)} trials on {folds} folds before the test rows, "
        f"{sum(one['state'] == 'pruned' for one in table)} of them stopped early, "
        f"{sum(one['state'] == 'failed' for one in table)} failed, {seconds:.1f} s",
        f"  best: {best['model']}, gain over the best baseline {best['gain']:+.4f} nats a row; all trials in {path}",
        *(["  ended by hours: another machine ends elsewhere"] if hours else []), *ending,
    ]  # fmt: skip
    return Result(
        lines, figure=trained and trained.plot, symbol=symbol, horizon=horizon, models=list(models),
        run_id=study.run_id, trials=pd.DataFrame(table), best=best, beats=best["gain"] > 0, command=command,
        verdict=trained and trained.verdict, trained_run_id=trained and trained.run_id, exact=not because,
        inexact_because=because, path=path, seconds=seconds,
    )  # fmt: skip


def _train_command(workspace: Workspace, data: PreparedDataset, best: Mapping, options: RunOptions) -> str:
    """Return the command that trains, or finds, the model of these settings."""
    words = ["train", "--workspace", workspace.address, "--symbol", data.symbol, "--horizon", data.horizon]
    words += ["--model", best["model"], "--seed", options.seed]
    words += [f"--{name}" for name in ("quick", "uncertified") if getattr(options, name)]
    words += [f"--set={name}={json.dumps(value)}" for name, value in best["settings"].items()]
    return "python -m ml_factory " + shlex.join(map(str, words))


# ---- the search ----------------------------------------------------------------------------------------------------


class _Study:
    """Trials of models and settings, in a journal that several processes may share.

    The number of a trial counts the trials begun before it, without those of killed processes. Its parameters are a
    function of the seed, this number and the finished trials. Once they are all in the journal, a process owns it.
    """

    def __init__(
        self, workspace: Workspace, data: PreparedDataset, given: Mapping[str, dict], scheme: FoldSchemeSpec,
        options: RunOptions,
    ):  # fmt: skip
        self.data, self.scheme, self.options = data, scheme, options
        self.given = given
        self.spaces: dict[str, dict] = {}  # model -> "model.setting" -> (range, default)
        for model, own in self.given.items():
            found = search_space(model).items()
            self.spaces[model] = {f"{model}.{name}": space for name, space in found if name not in own}
            plan_model_folds(data, FoldModel(options.seed, model, own), scheme, options.quick)  # refused before hours
        identity = (
            ("base_models", list(given)), ("folds", scheme.folds), ("model_settings", self.given),
            ("search", source_hash([f"workflows/{name}.py" for name in ("auto", "cross_validate", "evaluation")])),
        )  # fmt: skip
        settings = RunSettings(
            data.symbol, data.horizon, "study", "auto", options.seed, options.quick, data.fingerprint, identity
        )
        run = newest_run_folder(workspace.results / data.symbol, settings.run_id, options.fresh)
        self.run_id, self.folder, self.checkpoints = run.run_id, run.folder, open_run_checkpoints(workspace, run)
        self.journal = self.folder / "journal.log"
        if opened_mirror(self.folder):  # of two machines the last push would win
            self.checkpoints.phase("study").acquire()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with file_lock(self.folder / "study.lock"):
            self.study = _open_study(self.journal)
        self.states = optuna.trial.TrialState

    def search(self, count: int | None, seconds: float) -> None:
        """Run trials until `count` are finished, or as many as fit into these seconds."""
        began = time.monotonic()
        with progress_phase("search", count, of="trials", start=len(self.finished(count))) as done:
            while True:
                with file_lock(self.folder / "study.lock"), disk_errors(self.journal):
                    self._fail_abandoned()
                    if files.read_json_or_none(self.folder / TRIALS) != (finished := self.finished()):
                        files.write_json(self.folder / TRIALS, finished)
                    trial = self._ask() if self._is_wanted(count, seconds + began - time.monotonic()) else None
                if trial is not None:
                    self._run(trial)
                    done(1)
                elif count is None or all(one.state.is_finished() for one in self._begun()[:count]):
                    return
                else:
                    time.sleep(POLL_SECONDS)

    def search_on_ray(
        self, address: str, workspace: Workspace, own_modules: Sequence[str], count: int | None, seconds: float
    ) -> None:  # fmt: skip
        """Do as `search`, in a process for each core of a cluster. They share the search; this process waits for all.

        workspace : that of this search.
        own_modules : as of `begin_task`.

        Raises SettingsError where the workspace is in a bucket or on a mount, FactoryError for what ended a process.
        """
        if opened_mirror(self.folder):
            raise SettingsError(
                "Processes that share a search share a folder", where="workspace", got=workspace.address,
                wanted="a folder at the same path on all machines, not in a bucket or on a mount",
                next_step="search without --ray",
            )  # fmt: skip
        options = replace(self.options, fresh=False, on_status=RunOptions.on_status)  # that can be sent
        until, known = time.time() + seconds, len(self.finished(count))
        joining = (self.data.symbol, self.data.horizon, self.given, self.scheme, options, count, until)
        call = _join_search, workspace.address, joining, {}, own_modules
        with joined_cluster(address), progress_phase("search", count, of="trials", start=known) as done:
            processes = min(int(ray_library.cluster_resources().get("CPU", 0)), count or math.inf)
            if not processes:
                raise SettingsError("This cluster has no core", where=address, next_step="wait for its machines")
            with closing(ended_tasks([begin_task(*call, num_cpus=1) for _ in range(processes)])) as looks:
                for ended in looks:
                    if errors := [outcome["reason"] for outcome in ended.values() if outcome["reason"]]:
                        raise FactoryError(errors[0])
                    now = len(self.finished(count))
                    done(now - known)
                    known = now

    def finished(self, count: int | None = None) -> list[dict]:
        """Return the facts of those finished among the first `count` trials, in order."""
        return [
            {"trial": number, "model": one.params["model"],
             "state": "failed" if one.state == self.states.FAIL else one.state.name.lower(),
             "folds": len(one.user_attrs.get("folds", ())), "gain": one.value,
             "settings": self._trial_settings(one.params), "reason": one.user_attrs.get("failed", "")}
            for number, one in enumerate(self._begun()[:count]) if one.state.is_finished()
        ]  # fmt: skip

    def inexact(self) -> list[str]:
        """Return the reasons why a trial may have other bits on another machine."""
        begun = self._begun()
        folds = [(one.params["model"], *fold) for one in begun for fold in one.user_attrs.get("folds", ())]
        first, found = {model: machine for model, _, _, machine in reversed(folds)}, []
        for model, _, reasons, machine in folds:
            elsewhere = describe_differences(first[model] | {"optuna": folds[0][3]["optuna"]}, machine)
            found = merge_inexact_reasons(found, [*reasons, *elsewhere])
        failed = [one.user_attrs["failed"] for one in begun if "failed" in one.user_attrs]
        return merge_inexact_reasons(found, [reason for reason in failed if "memory" in reason.lower()])

    def _begun(self) -> list:
        """Return the trials in their order, without those of killed processes."""
        unseen = (self.states.WAITING, self.states.FAIL)
        trials = self.study.get_trials(deepcopy=False)
        return [one for one in trials if one.state not in unseen or "failed" in one.user_attrs]

    def _trial_settings(self, params: Mapping) -> dict:
        """Return a trial's settings, without those that are the model's defaults."""
        model = params["model"]
        found = {name.partition(".")[2]: params.get(name, default) for name, (_, default) in self.spaces[model].items()
                 if params.get(name, default) != default}  # fmt: skip
        return self.given[model] | {name: _rounded(value) for name, value in found.items()}

    def _settings(self, params: Mapping) -> RunSettings:
        return make_run_settings(
            self.data.symbol, self.data.horizon, params["model"], task="folds", seed=self.options.seed,
            quick=self.options.quick, data=self.data.fingerprint, settings=self._trial_settings(params),
        )  # fmt: skip

    def _phase(self, trial: Any) -> Any:
        """Return the checkpoints of a trial, which a process owns while it works on it."""
        return self.checkpoints.phase(trial.user_attrs["phase"])

    def _is_wanted(self, count: int | None, left: float) -> bool:
        """Return True where another trial is to begin; in time, the longest so far and the training must fit.

        False also where every trial has failed, among them those with each model's defaults.
        """
        begun = self._begun()
        if len(begun) >= len(self.spaces) and all(one.state == self.states.FAIL for one in begun):
            return False
        longest = max((one.duration.total_seconds() for one in begun if one.duration), default=0.0)
        return len(begun) < count if count else left > longest * (1 + 1 / self.scheme.folds)

    def _fail_abandoned(self) -> None:
        """Fail running trials that no living process owns; their parameters are tried again."""
        for one in self._begun():
            if one.state.is_finished():
                continue
            whole = "phase" in one.user_attrs
            try:
                with self._phase(one).acquired() if whole else nullcontext():  # else no process owned it
                    self.study.tell(one.number, state=self.states.FAIL)
            except CheckpointError:
                continue
            if whole and "failed" not in one.user_attrs:
                self.study.enqueue_trial(one.params)

    def _ask(self) -> Any:
        """Begin the next trial: choose its model and settings, and own it."""
        number, models = len(self._begun()), list(self.spaces)
        if number < len(models) and not self.study.get_trials(deepcopy=False, states=(self.states.WAITING,)):
            defaults = {name: default for name, (_, default) in self.spaces[models[number]].items()}
            self.study.enqueue_trial({"model": models[number], **defaults})
        self.study.sampler = optuna.samplers.TPESampler(seed=derive_seed(self.options.seed, "auto", number))
        trial = self.study.ask()
        model = trial.suggest_categorical("model", models)
        for name, (bounds, _) in self.spaces[model].items():
            _suggest(trial, name, *bounds)
        # A retry gets the name, and so the checkpoints, of the trial whose process was killed.
        others = {one.user_attrs.get("phase") for one in self._begun() if not one.state.is_finished()}
        names = (f"trial_{fingerprint_json(trial.params)[:16]}_{number}" for number in itertools.count())
        trial.set_user_attr("phase", next(name for name in names if name not in others))
        self._phase(trial).acquire()
        return trial

    def _run(self, trial: Any) -> None:
        """Cross-validate a trial fold by fold, except folds that a killed process has finished, and record it."""
        settings, owned, count = self._settings(trial.params), self._phase(trial), self.scheme.folds
        machine = run_machine_facts(settings) | {"optuna": optuna.__version__}
        same = [one.user_attrs.get("folds", []) for one in self.study.get_trials() if one.params == trial.params]
        # A trial whose process was killed resumes after the folds that its longest attempt has finished.
        folds, mean, state, phases = max(same, key=len), None, self.states.COMPLETE, [owned]
        try:
            for fold in range(count):
                phase = self.checkpoints.phase(f"{owned.name}_{fold + 1}")
                phases.append(phase)
                if fold == len(folds):
                    checkpoints = FitCheckpoints(phase, machine)
                    gain, reasons = fold_gain(self.data, settings, self.scheme, fold, checkpoints)
                    folds.append([gain, merge_inexact_reasons(reasons, checkpoints.machine_differences), machine])
                mean = _mean_gain(folds, fold + 1)
                with disk_errors(self.journal):
                    trial.set_user_attr("folds", folds[: fold + 1])
                push_in_background(self.folder)  # a machine may vanish before the last fold
                phase.remove_files()
                if 0 < fold < count - 1 and self._is_below_median(mean, fold + 1):
                    state = self.states.PRUNED
                    break
            outcome = f"gain {mean:+.4f} after {fold + 1} of {count} folds"
        except FactoryError as error:
            if isinstance(error, _NOT_OF_A_TRIAL) and not isinstance(error, NonFiniteError):
                raise
            outcome, state = f"failed. {error}", self.states.FAIL
            with disk_errors(self.journal):
                trial.set_user_attr("failed", str(error))
        with file_lock(self.folder / "study.lock"), disk_errors(self.journal):
            self.study.tell(trial, mean if state == self.states.COMPLETE else None, state)
            for phase in phases:  # another process looks at them under this lock alone
                phase.release()
                for path in (phase.lease.path, phase.lease.lock_file):
                    with suppress(FileError):
                        files.remove(path)
        push_in_background(self.folder)
        self.options.on_status(f"{settings.model}: {outcome}")

    def _is_below_median(self, mean: float, count: int) -> bool:
        """Return True where this mean gain over the first folds is below the median of the other trials' there.

        The median stopping rule of Vizier (Golovin et al. 2017, 3.2.2). A signed-rank test of five folds decides after
        the fourth at the earliest.
        """
        trials = self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE, self.states.PRUNED))
        others = [_mean_gain(folds, count) for one in trials if len(folds := one.user_attrs["folds"]) >= count]
        return len(others) >= FINISHED_BEFORE_STOPS and mean < np.median(others)


def _join_search(
    address: str, symbol: str, horizon: int, given: Mapping, scheme: FoldSchemeSpec, options: RunOptions,
    count: int | None, until: float,
) -> None:  # fmt: skip
    """Run trials of a search in this process of a cluster, next to the others, until this time."""
    workspace = Workspace(address)
    study = _Study(workspace, load_dataset(workspace, symbol, horizon), given, scheme, options)
    with study.checkpoints:
        study.search(count, until - time.time())


def _mean_gain(folds: Sequence, count: int) -> float:
    return float(np.mean([gain for gain, *_ in folds[:count]]))


def _rounded(value: float) -> float:
    """Return a setting with the three digits that the command of the training shows."""
    return value if isinstance(value, int) else float(f"{value:.3g}")


def _suggest(trial: Any, name: str, low: float, high: float, how: str | int = 1) -> None:
    """Choose a parameter of a range as in `EstimatorSpec.SEARCH`."""
    if isinstance(low, int):
        trial.suggest_int(name, low, high, **({"log": True} if how == "log" else {"step": how}))
    else:
        trial.suggest_float(name, low, high, log=how == "log")


def _open_study(path: Path) -> Any:
    """Open the search of this journal, without a last line that a full disk cut off. Raises CheckpointError."""
    lock = journal.JournalFileOpenLock(str(path))
    with refuse_damaged_content(
        CheckpointError, "The journal of this search is damaged", where=path, next_step="begin another with FRESH"
    ):
        lock.acquire()
        try:
            text = files.read(path) if files.is_file(path) else b""
            if not text.endswith(b"\n"):
                files.write(path, text[: text.rfind(b"\n") + 1])
        finally:
            lock.release()
        return optuna.create_study(
            storage=journal.JournalStorage(journal.JournalFileBackend(str(path), lock_obj=lock)), study_name="auto",
            direction="maximize", load_if_exists=True,
        )  # fmt: skip
