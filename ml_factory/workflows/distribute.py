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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import DEFAULT_HORIZONS, check_field_types, check_horizon, check_seed, read_yaml
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import FactoryError, NotPreparedError, SettingsError, WorkspaceError, did_you_mean
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.models.registry import check_registered_model_settings
from ml_factory.models.setting_names import parse_setting_value
from ml_factory.own_modules import import_own_modules
from ml_factory.process_identity import machine_cores
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.runs import StoredRun, read_stored_runs
from ml_factory.settings import DataSpec, make_run_settings, settings_with_values
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json, to_json_value
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.cross_validate import cross_validate
from ml_factory.workflows.folds import FoldSchemeSpec
from ml_factory.workflows.leaderboard import fit_seconds, leaderboard
from ml_factory.workflows.prepare import prepare, settings_after_previous
from ml_factory.workflows.report import evaluate
from ml_factory.workflows.stack import check_stack_base_models, stack, stack_folds
from ml_factory.workflows.train import train

ray_library = LazyModule("ray")
FITS = ("train", "cross_validate")
VERBS = {one.__name__: one for one in (prepare, train, cross_validate, stack, evaluate)}
DONE, FAILED, NOT_RUN, TO_DO = "done", "failed", "not run", "to do"
POLL_SECONDS = 1.0  # between two looks at the units that run
RETRIES = 3  # of a unit whose process or machine dies
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
        check_field_types(self)
        given = (
            self.models if isinstance(self.models, Mapping) else {name: {} for name in _texts("models", self.models)}
        )
        models = {
            name: check_registered_model_settings(name, _parsed(f"models.{name}", own)) for name, own in given.items()
        }
        object.__setattr__(self, "models", models)
        for verb in _texts("make", self.make):
            if verb not in VERBS:
                raise SettingsError("No verb of a sweep", where="make", got=repr(verb), wanted=", ".join(VERBS),
                                    next_step=did_you_mean(str(verb), VERBS))  # fmt: skip
        for check, values in ((check_symbol, self.symbols), (check_horizon, self.horizons), (check_seed, self.seeds)):
            for value in values:
                check(value)
        _data_spec(self.data)
        if self.folds < 2:
            raise SettingsError("Too few folds", where="folds", got=self.folds, wanted="2 or more")
        if "stack" in self.make:
            check_stack_base_models(tuple(models))
        if not 0 < self.cores < float("inf") or not 0 <= self.gpus < float("inf"):
            raise SettingsError("No unit can occupy this", where="cores, gpus", got=(self.cores, self.gpus),
                                wanted="cores above 0, gpus of 0 or more")  # fmt: skip


@dataclass(frozen=True)
class _Unit:
    """One call of a verb: its symbol, horizon and seed, the models that it fits, the units that it waits for."""

    verb: str
    symbol: str
    horizon: int = 0
    seed: int = 0
    models: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in tables and messages, such as "train MES 20 lstm seed 0"."""
        parts = [self.verb, self.symbol, *([self.horizon] if self.horizon else [])]
        parts += [*(self.models if self.verb in FITS else ()), *(("seed", self.seed) if self.models else ())]
        return " ".join(map(str, parts))


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
        table = pd.DataFrame(_forecast(workspace, spec, units))
        counted = table["state"].value_counts()
        lines = [f"{counted.get(TO_DO, 0)} of {len(table)} units to do, {counted.get(DONE, 0)} finished"]
        lines += [f"  {one.unit}: {one.state}" + (f", some {one.minutes:.1f} min" if one.minutes > 0 else "")
                  for one in table.itertuples()]  # fmt: skip
        return Result(lines, units=table, failed=[], leaderboard=None, seconds=time.perf_counter() - started)
    outcomes = _run_on_ray(workspace, spec, units, ray, tuple(own_modules))
    table = pd.DataFrame([{"unit": name, **outcome} for name, outcome in outcomes.items()])
    failed = table[table["state"] != DONE]
    machines, seconds = table["machine"].replace("", np.nan).nunique(), time.perf_counter() - started
    lines = [f"{len(table) - len(failed)} of {len(table)} units done on {machines} machines, {seconds:.1f} s"]
    lines += [f"  {one.unit}: {one.state}. {one.reason}" for one in failed.itertuples()]
    trained = [
        unit.symbol for name, unit in units.items() if unit.verb != "prepare" and outcomes[name]["state"] == DONE
    ]
    compared = None
    if trained:
        try:
            compared = leaderboard(workspace.address, [*dict.fromkeys(trained)], spec.horizons)
        except FactoryError as error:  # the table of hours of work is returned all the same
            lines.append(f"No leaderboard. {error}")
        else:
            lines += compared.summary().splitlines()
    return Result(
        lines, units=table, failed=failed["unit"].tolist(), leaderboard=compared and compared.frame, seconds=seconds
    )


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
    units = []
    for symbol in spec.symbols:
        units.append(_Unit("prepare", symbol))
        prepared = (units[-1].name,) if "prepare" in spec.make else ()
        for horizon in spec.horizons:
            for seed in spec.seeds:
                place = symbol, horizon, seed
                fits = [_Unit(verb, *place, (name,), prepared) for verb in FITS for name in spec.models]
                trained = tuple(one.name for one in fits if one.verb == "train") if "train" in spec.make else prepared
                units += [*fits, *([_Unit("stack", *place, tuple(spec.models), trained)] if fits else [])]
            units.append(_Unit("evaluate", symbol, horizon, needs=prepared))
    found = {one.name: one for one in units if one.verb in spec.make}
    if not found:
        raise SettingsError("There is nothing to do in this sweep", where="sweep", got=f"make: {', '.join(spec.make)}",
                            wanted="symbols, horizons, seeds, models and make, each with at least one")  # fmt: skip
    return found


def _arguments(spec: SweepSpec, unit: _Unit) -> tuple[tuple, dict]:
    """Return the arguments of the unit's verb after the workspace, by position and by name."""
    if unit.verb == "prepare":
        return (unit.symbol, spec.horizons), {"settings": _data_spec(spec.data)}
    if unit.verb == "evaluate":
        return (unit.symbol, unit.horizon), {}
    run = {"seed": unit.seed, "quick": spec.quick, "uncertified": spec.uncertified}
    if unit.verb == "stack":
        own = {name: spec.models[name] for name in unit.models}
        return (unit.symbol, unit.horizon, unit.models), run | {"folds": spec.folds, "model_settings": own}
    scheme = {"scheme": FoldSchemeSpec(folds=spec.folds)} if unit.verb == "cross_validate" else {}
    return (unit.symbol, unit.horizon, *unit.models), run | scheme | {"model_settings": spec.models[unit.models[0]]}


# ---- on Ray --------------------------------------------------------------------------------------------------------


def _run_on_ray(
    workspace: Workspace, spec: SweepSpec, units: Mapping[str, _Unit], address: str | None, own_modules: tuple[str, ...]
) -> dict[str, dict]:  # fmt: skip
    """Run the units, and return their outcomes by name. Ray queues them, by what they wait for and by what they occupy.

    Raises SettingsError for a unit that no machine can run.
    """
    with _joined_cluster(address):
        alive = [node["Resources"] for node in ray_library.nodes() if node["Alive"]]
        for kind, wanted in (("CPU", spec.cores), ("GPU", spec.gpus)):
            most = max(one.get(kind, 0) for one in alive)
            if wanted > most:
                raise SettingsError(
                    "No machine can run a unit of this size", where="gpus" if kind == "GPU" else "cores", got=wanted,
                    wanted=f"at most {most:g}", next_step="give fewer, or the --ray address of a larger cluster",
                )  # fmt: skip
        task, begun, outcomes = ray_library.remote(max_retries=RETRIES)(_run_unit), {}, {}

        def run(together: Sequence[_Unit]) -> None:
            for unit in together:
                occupied = {"num_cpus": spec.cores, "num_gpus": spec.gpus if unit.models else 0}
                begun[unit.name] = task.options(**occupied, name=unit.name).remote(
                    workspace.address,
                    unit.verb,
                    *_arguments(spec, unit),
                    own_modules,
                    *(begun[one] for one in unit.needs),
                )
            left = {begun[unit.name]: unit.name for unit in together}
            while left:
                ended, _ = ray_library.wait([*left], num_returns=len(left), timeout=0)
                for one in ended:
                    outcomes[left.pop(one)] = _outcome(one)
                    done(1)
                if not ended:
                    time.sleep(POLL_SECONDS)  # Ctrl-C ends a sleep; inside Ray it would be lost

        with progress_phase("sweep", len(units), of="units") as done:
            run([unit for unit in units.values() if unit.verb != "evaluate"])
            for unit in units.values():
                if unit.verb == "evaluate":
                    run([unit])
    for name, unit in units.items():  # Ray passes the error of a unit that died on to those that wait for it
        if behind := [one for one in unit.needs if outcomes[one]["state"] != DONE]:
            outcomes[name] |= {"state": NOT_RUN, "reason": f"It needs: {behind[0]}"}
    return {name: outcomes[name] for name in units}


@contextmanager
def _joined_cluster(address: str | None) -> Iterator[None]:
    """Join a cluster, or start Ray here, and leave it at the end, unless this process has joined one before.

    Raises WorkspaceError where the cluster does not answer.
    """
    if ray_library.is_initialized():
        yield
        return
    environment, handlers = dict(os.environ), {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.pop("OMP_NUM_THREADS", None)  # Ray gives each unit as many threads as it occupies cores
    local = {"num_cpus": machine_cores(), "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        try:
            ray_library.init(
                address or "local", log_to_driver=False, logging_level="error", **({} if address else local)
            )
        except (ValueError, ConnectionError, RuntimeError) as error:
            raise SettingsError(
                "Ray does not start, or this cluster does not answer", where=address or "this machine",
                got=" ".join(str(error).split())[:200], next_step="check --ray",
            ) from None  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray sets its own
                signal.signal(number, handler)
        yield
    finally:
        ray_library.shutdown()
        for name in {*os.environ} - {*environment}:
            del os.environ[name]
        os.environ.update(environment)


def _outcome(reference: Any) -> dict:
    """Return the outcome of an ended unit, also of one whose process or machine has died too often."""
    try:
        return ray_library.get(reference)
    except ray_library.exceptions.RayError as error:
        reason = f"Its process or machine died {RETRIES + 1} times: {type(error).__name__}. Next: more memory, or fewer"
        return {"state": FAILED, "minutes": np.nan, "machine": "", "reason": f"{reason} units at a time by `cores`"}


def _run_unit(
    address: str, verb: str, given: tuple, options: Mapping, own_modules: Sequence[str], *needed: Mapping
) -> dict:  # fmt: skip
    """Call a verb in this process of the cluster; return its outcome."""
    began = time.perf_counter()

    def outcome(state: str, reason: str = "") -> dict:
        minutes = (time.perf_counter() - began) / 60
        return {"state": state, "minutes": minutes, "machine": socket.gethostname(), "reason": reason}

    if any(one["state"] != DONE for one in needed):
        return outcome(NOT_RUN)
    try:
        if "://" not in address and not files.is_folder(Path(address)):
            raise WorkspaceError(
                "A machine of the cluster does not see the workspace", where=address, got=socket.gethostname(),
                next_step="put it into a folder that all machines share, or into a bucket",
            )  # fmt: skip
        import_own_modules(own_modules)
        VERBS[verb](address, *given, **options)
    except FactoryError as error:
        return outcome(FAILED, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - one that Ray cannot pass on would hide itself
        return outcome(
            FAILED, f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-2:])}"
        )
    return outcome(DONE)


# ---- what is finished ----------------------------------------------------------------------------------------------


def _forecast(workspace: Workspace, spec: SweepSpec, units: Mapping[str, _Unit]) -> list[dict]:
    """Return a row per unit: whether it is finished, and the minutes of a training, by those of the same model."""
    stored = {symbol: read_stored_runs(workspace.results / symbol)[0] for symbol in spec.symbols}
    taken: dict[str, list[float]] = {}
    for artifact in [one for symbol in spec.symbols for one in ArtifactRegistry(workspace.models).list(symbol)]:
        if artifact.kind == "model" and artifact.facts["run"]["quick"] == spec.quick:
            taken.setdefault(artifact.facts["model"], []).append(fit_seconds(artifact) / 60)
    states, rows = {}, []
    for name, unit in units.items():
        known = taken.get(unit.models[0], ()) if unit.verb == "train" else ()
        ready = all(states[one] == DONE for one in unit.needs)
        states[name] = DONE if ready and _is_finished(workspace, spec, unit, stored[unit.symbol]) else TO_DO
        minutes = float(np.mean(known)) if known and states[name] == TO_DO else np.nan
        rows.append({"unit": name, "state": states[name], "minutes": minutes, "machine": "", "reason": ""})
    return rows


def _is_finished(workspace: Workspace, spec: SweepSpec, unit: _Unit, stored: Sequence[StoredRun]) -> bool:
    """Return True where a unit would only load what is there. A report is always written again."""
    try:
        data = DatasetStore.current(workspace.processed(unit.symbol))
    except NotPreparedError:
        return False
    if unit.verb == "evaluate":
        return False
    if unit.verb == "prepare":
        settings = settings_after_previous(_data_spec(spec.data), workspace.processed(unit.symbol))
        before = data.facts["settings"]  # whose bars have the length that was found in the file
        same = fingerprint_json(settings.to_dict() | {"bars": before["bars"]}) == fingerprint_json(before)
        return same and {*spec.horizons} <= {*data.horizons}
    ended = [one for one in stored if one.ended and one.facts["data"] == data.fingerprint]
    if unit.verb == "stack":  # its id has the hashes of its base models: it is compared without them
        own = {name: to_json_value(given) for name, given in spec.models.items() if given}
        settings = {"base_models": [*unit.models], "folds": stack_folds(spec.folds, spec.quick)}
        wanted = (unit.horizon, unit.seed, spec.quick, settings | ({"model_settings": own} if own else {}))
        found = [
            (*(one.facts[key] for key in ("horizon", "seed", "quick")),
             {key: value for key, value in one.facts["settings"].items() if key != "bases"})
            for one in ended
        ]  # fmt: skip
        bases = [replace(unit, verb="train", models=(name,)) for name in unit.models]
        return wanted in found and all(_is_finished(workspace, spec, one, stored) for one in bases)
    folds = FoldSchemeSpec(folds=spec.folds).to_dict() if unit.verb == "cross_validate" else {}
    name = unit.models[0]
    settings = make_run_settings(
        unit.symbol, unit.horizon, name, task="folds" if folds else "train", seed=unit.seed, quick=spec.quick,
        data=data.fingerprint, settings={**spec.models[name], **folds},
    )  # fmt: skip
    return settings.run_id in {one.base for one in ended}
