"""`distribute`: prepare, train and judge many symbols, horizons, models and seeds as tasks of a Ray cluster.

A unit of work is one call of a verb, which finds what is finished and resumes what is not: a unit that is called again
continues, and a sweep keeps nothing of its own. Units open the workspace themselves; only their outcomes pass between
machines.
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import DEFAULT_HORIZONS, check_horizon, check_seed, check_settings, read_yaml
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import FactoryError, NotPreparedError, SettingsError, WorkspaceError, check_known
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.models.registry import check_registered_model_settings
from ml_factory.models.setting_names import parse_setting_value
from ml_factory.own_modules import import_own_modules
from ml_factory.process_identity import machine_cores
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.settings import DataSpec, settings_with_values
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.cross_validate import cross_validate
from ml_factory.workflows.folds import FoldSchemeSpec
from ml_factory.workflows.leaderboard import leaderboard, training_seconds
from ml_factory.workflows.plan import WorkOnData
from ml_factory.workflows.prepare import prepare, settings_after_previous
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset
from ml_factory.workflows.report import evaluate
from ml_factory.workflows.stack import check_stack_base_models, settings_per_model, stack
from ml_factory.workflows.train import train

ray_library = LazyModule("ray")
VERBS = {one.__name__: one for one in (prepare, train, cross_validate, stack, evaluate)}
DONE, FAILED, NOT_RUN, TO_DO = "done", "failed", "not run", "to do"
POLL_SECONDS = 1.0  # between two looks at the units that run
RETRIES = 3  # of a task whose process or machine dies
JOINS = 3  # tries to join a cluster: Ray's server for a new program dies now and then as it starts
STORE_BYTES = 80_000_000  # of Ray's object store, the least that it takes: no rows pass through it


@dataclass(frozen=True)
class SweepSpec:
    """What a sweep is made of, by the names in its file.

    symbols : each with bars in the workspace, or prepared.
    horizons : of all of them.
    models : names, or model -> its settings.
    seeds : each model is trained with each.
    make : the verbs that are called, of VERBS.
    data : fields of `DataSpec` for `prepare`, by name, such as labels.k_up; without any the labels of the last call.
    folds, quick, uncertified : as of `cross_validate`, `stack` and `train`.
    cores, gpus : that a unit occupies; a GPU only where it fits a model. Boosters on cores and networks on GPUs are two
        sweeps of one workspace.
    """

    symbols: tuple[str, ...] = ()
    models: Mapping[str, Mapping] | tuple[str, ...] = ()
    horizons: tuple[int, ...] = DEFAULT_HORIZONS
    seeds: tuple[int, ...] = (0,)
    make: tuple[str, ...] = ("prepare", "train")
    data: Mapping[str, Any] = field(default_factory=dict)
    folds: int = 5
    quick: bool = False
    uncertified: bool = False
    cores: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        check_settings(self, folds="[2, inf)", cores="(0, inf)", gpus="[0, inf)")
        given = (
            self.models if isinstance(self.models, Mapping) else {name: {} for name in _texts("models", self.models)}
        )
        models = {
            name: check_registered_model_settings(name, _parsed(f"models.{name}", own)) for name, own in given.items()
        }
        object.__setattr__(self, "models", models)
        for verb in _texts("make", self.make):
            check_known("No verb of a sweep", "make", verb, VERBS)
        for check, values in ((check_symbol, self.symbols), (check_horizon, self.horizons), (check_seed, self.seeds)):
            for value in values:
                check(value)
        _data_spec(self.data)
        if "stack" in self.make:
            check_stack_base_models(tuple(models))


@dataclass(frozen=True)
class _Unit:
    """One call of a verb: its arguments after the workspace, the names of the units that it waits for."""

    verb: str
    given: tuple
    options: Mapping[str, Any]
    needs: tuple[str, ...]


def distribute(
    workspace: Workspace | str | Path, sweep: str | Path | Mapping | SweepSpec, ray: str | None = None, *,
    dry_run: bool = False, own_modules: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Run the units of a sweep on a Ray cluster, each when what it reads is finished, and compare all models.

    A unit whose process or machine dies is called again up to three times, and continues. One that fails is reported,
    and the units that do not depend on it continue. `evaluate` is called at the end for one symbol and horizon after
    another: they write the same report.

    sweep : a YAML file with the fields of `SweepSpec`, or their values.
    ray : address of a cluster, such as ray://host:10001, whose machines reach the workspace at the same path or URL;
        None: this machine alone.
    dry_run : list the units and start nothing.
    own_modules : modules, or .py files, that define the features and networks of your own; imported in each process.

    The result has

    units : a row per unit: unit, state (done, failed, not run; in a dry run done, to do), minutes (in a dry run those
        that trainings of the same model took here; NaN without one), machine, reason.
    failed : the names of units that failed or, because of one, did not run.
    leaderboard : table of `leaderboard` over the symbols of which a unit after `prepare` is done; None without one.

    Raises SettingsError, MissingPackageError, WorkspaceError.
    """
    check_packages_installed("ray")
    started, workspace = time.perf_counter(), Workspace(workspace)
    import_own_modules(own_modules)
    spec = sweep if isinstance(sweep, SweepSpec) else _read_sweep(sweep)
    units = _units(spec)
    if dry_run:
        outcomes = _forecast(workspace, spec, units)
    else:
        outcomes = _run_on_ray(workspace, spec, units, ray, tuple(own_modules))
    table = pd.DataFrame([{"unit": name, **outcome} for name, outcome in outcomes.items()])
    done, failed = (table["unit"][table["state"].isin(states)].tolist() for states in ([DONE], [FAILED, NOT_RUN]))
    machines, seconds = table["machine"].replace("", np.nan).nunique(), time.perf_counter() - started
    lines = [f"{len(done)} of {len(table)} units done" + f" on {machines} machines, {seconds:.1f} s" * (not dry_run)]
    shown = table if dry_run else table[table["state"] != DONE]
    lines += [f"  {one.unit}: {one.state}. {one.reason}".rstrip(". ") for one in shown.itertuples()]
    symbols = dict.fromkeys(units[name].given[0] for name in done if units[name].verb != "prepare")
    compared = None
    if symbols and not dry_run:
        try:
            compared = leaderboard(workspace.address, [*symbols], spec.horizons)
            lines += compared.summary().splitlines()
        except FactoryError as error:  # the table of hours of work is returned all the same
            lines.append(f"No leaderboard. {error}")
    return Result(lines, units=table, failed=failed, leaderboard=compared and compared.frame, seconds=seconds)


def _read_sweep(given: str | Path | Mapping) -> SweepSpec:
    """Build the spec of a file or of values by name. Raises SettingsError for an unknown name or an unfit value."""
    table = given if isinstance(given, Mapping) else read_yaml(Path(given), "YAML with symbols, horizons, models, make")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    return settings_with_values(SweepSpec(), values, "sweep.")


def _texts(where: str, given: Any) -> Sequence[str]:
    """Return these names. Raises SettingsError for anything but several texts."""
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise SettingsError("Not a list of names", where=where, got=repr(given), wanted="[name, name]")
    return given


def _parsed(where: str, given: Any) -> dict:
    """Return settings by name; numbers that YAML reads as text, such as 1e-4, are numbers. Raises SettingsError."""
    flat = isinstance(given, Mapping | None) and not any(isinstance(value, Mapping) for value in (given or {}).values())
    if not flat or not all(isinstance(name, str) for name in given or ()):
        raise SettingsError("Not settings by name", where=where, got=repr(given),
                            wanted="name: value, a nested one as labels.k_up: value")  # fmt: skip
    return {
        name: parse_setting_value(value, f"{where}.{name}") if isinstance(value, str) else value
        for name, value in (given or {}).items()
    }


def _data_spec(given: Mapping[str, Any]) -> DataSpec | None:
    return settings_with_values(DataSpec(), _parsed("data", given), "data.") if given else None


def _units(spec: SweepSpec) -> dict[str, _Unit]:
    """Return the units by name, each after those that it needs. Raises SettingsError where there are none."""
    found: dict[str, _Unit] = {}

    def add(verb: str, *given: Any, needs: tuple[str, ...] = (), **options: Any) -> tuple[str, ...]:
        """Add a unit that the sweep makes; return what waits for it waits for: without it what it would need."""
        if verb not in spec.make:
            return needs
        name = " ".join(map(str, (verb, *given, *(("seed", options["seed"]) if "seed" in options else ()))))
        found[name] = _Unit(verb, given, options, needs)
        return (name,)

    for symbol in spec.symbols:
        ready = add("prepare", symbol, horizons=spec.horizons, settings=_data_spec(spec.data))
        for horizon in spec.horizons:
            for seed in spec.seeds if spec.models else ():
                run, trained = {"seed": seed, "quick": spec.quick, "uncertified": spec.uncertified}, ready
                for name, own in spec.models.items():
                    fit = run | {"needs": ready, "model_settings": own}
                    trained += add("train", symbol, horizon, name, **fit)
                    add("cross_validate", symbol, horizon, name, **fit, scheme=FoldSchemeSpec(folds=spec.folds))
                stacked = {"base_models": tuple(spec.models), "model_settings": spec.models, "folds": spec.folds}
                add("stack", symbol, horizon, **run, needs=tuple(dict.fromkeys(trained)), **stacked)
            add("evaluate", symbol, horizon, needs=ready)
    if not found:
        raise SettingsError("There is nothing to do in this sweep", where="sweep", got=f"make: {', '.join(spec.make)}",
                            wanted="symbols, horizons, seeds, models and make, each with at least one")  # fmt: skip
    return found


# ---- on Ray --------------------------------------------------------------------------------------------------------


def _run_on_ray(
    workspace: Workspace, spec: SweepSpec, units: Mapping[str, _Unit], address: str | None, own_modules: tuple[str, ...]
) -> dict[str, dict]:  # fmt: skip
    """Run the units, and return their outcomes by name. Ray queues them, by what they wait for and by what they occupy.

    Raises SettingsError for a unit that no machine can run.
    """
    with joined_cluster(address):
        alive = [node["Resources"] for node in ray_library.nodes() if node["Alive"]]
        for kind, wanted in (("CPU", spec.cores), ("GPU", spec.gpus)):
            most = max(one.get(kind, 0) for one in alive)
            if wanted > most:
                raise SettingsError(
                    "No machine can run a unit of this size", where="gpus" if kind == "GPU" else "cores", got=wanted,
                    wanted=f"at most {most:g}", next_step="give fewer, or the --ray address of a larger cluster",
                )  # fmt: skip
        begun: dict[str, Any] = {}
        outcomes: dict[str, dict] = {}

        def run(together: Sequence[str]) -> None:
            for name in together:
                unit, needed = units[name], [begun[one] for one in units[name].needs]
                occupied = {"num_cpus": spec.cores, "num_gpus": spec.gpus if "seed" in unit.options else 0}
                call = VERBS[unit.verb], workspace.address, unit.given, unit.options, own_modules
                begun[name] = begin_task(*call, *needed, **occupied, name=name)
            names = {begun[name]: name for name in together}
            for ended in ended_tasks([*names]):
                outcomes.update({names[one]: outcome for one, outcome in ended.items()})
                done(len(ended))

        with progress_phase("sweep", len(units), of="units") as done:
            run([name for name, unit in units.items() if unit.verb != "evaluate"])
            for name, unit in units.items():
                if unit.verb == "evaluate":
                    run([name])
    for name, unit in units.items():  # Ray passes the error of a unit that died on to those that wait for it
        if behind := [one for one in unit.needs if outcomes[one]["state"] != DONE]:
            outcomes[name] |= {"state": NOT_RUN, "reason": f"It needs: {behind[0]}"}
    return {name: outcomes[name] for name in units}


@contextmanager
def joined_cluster(address: str | None) -> Iterator[None]:
    """Join a cluster, or start Ray here, and leave it at the end, unless this process has joined one before.

    address : of the cluster; None or "local" starts Ray.

    Raises SettingsError where the cluster does not answer.
    """
    if ray_library.is_initialized():
        yield
        return
    environment, on_term = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray gives each unit as many threads as it occupies cores
    local = {"num_cpus": machine_cores(), "include_dashboard": False, "object_store_memory": STORE_BYTES}
    address = address or "local"
    try:
        try:
            host, _, port = address.rpartition(":")
            if port.isdecimal() and "/" not in host:  # Ray would try for ever
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            for left in reversed(range(JOINS)):
                try:
                    ray_library.init(
                        address, log_to_driver=False, logging_level="error", **(local if address == "local" else {})
                    )
                    break
                except ConnectionAbortedError:
                    if not left:
                        raise
        except (ValueError, OSError, RuntimeError) as error:
            raise SettingsError(
                "Ray does not start, or this cluster does not answer", where=address,
                got=" ".join(str(error).split())[:200],
                next_step="check --ray; a cluster with a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN",
            ) from None  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)  # Ray sets its own
        yield
    finally:
        ray_library.shutdown()
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update(environment)


def begin_task(
    verb: Callable, address: str, given: tuple, options: Mapping[str, Any], own_modules: Sequence[str], *needed: Any,
    **occupied: Any,
) -> Any:  # fmt: skip
    """Begin `_run_task` of these arguments on the cluster, again where its process or machine dies.

    own_modules : names, or .py files, whose paths the cluster's processes get whole.
    occupied : options of a Ray task, such as num_cpus.
    """
    own = [str(Path(one).expanduser().resolve()) if one.endswith(".py") else one for one in own_modules]
    task = ray_library.remote(max_retries=RETRIES)(_run_task).options(**occupied)
    return task.remote(verb, address, given, options, own, *needed)


def ended_tasks(left: list) -> Generator[dict[Any, dict], None, None]:
    """Yield, at each look at these tasks, the outcomes of those that have ended since the last one.

    Closed, or interrupted, it ends the others.
    """
    try:
        while left:
            ended, left = ray_library.wait(left, num_returns=len(left), timeout=0)
            yield {one: _outcome(one) for one in ended}
            if left:
                time.sleep(POLL_SECONDS)  # Ctrl-C ends a sleep; inside Ray it would be lost
    finally:
        for one in left:
            ray_library.cancel(one, force=True)


def _outcome(reference: Any) -> dict:
    """Return the outcome of an ended task, also of one whose process or machine has died too often."""
    try:
        return ray_library.get(reference)
    except ray_library.exceptions.RayError as error:
        reason = f"Its process or machine died {RETRIES + 1} times: {type(error).__name__}. Next: more memory, or fewer"
        return {"state": FAILED, "minutes": np.nan, "machine": "", "reason": f"{reason} at a time (`cores` of a sweep)"}


def _run_task(
    verb: Callable, address: str, given: tuple, options: Mapping[str, Any], own_modules: Sequence[str], *needed: Mapping
) -> dict:  # fmt: skip
    """Call a verb in this process of the cluster; return its outcome."""
    began, state, reason = time.perf_counter(), DONE, ""
    if any(one["state"] != DONE for one in needed):
        return {"state": NOT_RUN, "minutes": 0.0, "machine": socket.gethostname(), "reason": ""}
    try:
        if "://" not in address and not files.is_folder(Path(address)):
            raise WorkspaceError(
                "A machine of the cluster does not see the workspace", where=address, got=socket.gethostname(),
                next_step="put it into a folder that all machines share, or into a bucket",
            )  # fmt: skip
        import_own_modules(own_modules)
        verb(address, *given, **options)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one that Ray cannot pass on would hide itself
        shown = [str(error)] if isinstance(error, FactoryError) else traceback.format_exception(error, limit=-2)
        state, reason = FAILED, "".join(shown).strip()
    minutes = (time.perf_counter() - began) / 60
    return {"state": state, "minutes": minutes, "machine": socket.gethostname(), "reason": reason}


# ---- what is finished ----------------------------------------------------------------------------------------------


def _forecast(workspace: Workspace, spec: SweepSpec, units: Mapping[str, _Unit]) -> dict[str, dict]:
    """Return of each unit whether it is finished, and the minutes of a training, by those of the same model."""
    taken: dict[str, list[float]] = {}
    for artifact in [one for symbol in spec.symbols for one in ArtifactRegistry(workspace.models).list(symbol)]:
        if artifact.kind == "model" and artifact.facts["run"]["quick"] == spec.quick:
            taken.setdefault(artifact.facts["model"], []).append(training_seconds(artifact) / 60)
    rows: dict[str, dict] = {}
    load = lru_cache(maxsize=1)(partial(load_dataset, workspace))  # units of one symbol and horizon follow each other
    for name, unit in units.items():
        ready = all(rows[one]["state"] == DONE for one in unit.needs)
        state = DONE if ready and _is_finished(workspace, spec, unit, load) else TO_DO
        known = taken.get(unit.given[-1], ()) if (unit.verb, state) == ("train", TO_DO) else ()
        minutes = float(np.mean(known)) if known else np.nan
        reason = f"some {minutes:.1f} min" if known else ""
        rows[name] = {"state": state, "minutes": minutes, "machine": "", "reason": reason}
    return rows


def _is_finished(
    workspace: Workspace, spec: SweepSpec, unit: _Unit, load: Callable[[str, int], PreparedDataset]
) -> bool:
    """Return True where a unit would only load what is there. A report is always written again."""
    processed = workspace.processed(unit.given[0])
    try:
        if unit.verb == "prepare":
            data, settings = DatasetStore.current(processed), settings_after_previous(_data_spec(spec.data), processed)
            before = data.facts["settings"]  # whose bars have the length that was found in the file
            same = fingerprint_json(settings.to_dict() | {"bars": before["bars"]}) == fingerprint_json(before)
            return same and {*spec.horizons} <= {*data.horizons}
        data = None if unit.verb == "evaluate" else load(*unit.given[:2])
    except NotPreparedError:
        return False
    models, scheme = tuple(spec.models), FoldSchemeSpec(folds=spec.folds)
    return data is not None and WorkOnData(
        workspace, data, models, settings_per_model(models, spec.models), scheme, unit.options["seed"], spec.quick
    ).is_finished({"cross_validate": "folds"}.get(unit.verb, unit.verb), *unit.given[2:])
