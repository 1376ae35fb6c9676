"""Audit of a prepared data set and of training on it: the full proof that nothing looks ahead."""

import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ml_factory.data.io import load_bars
from ml_factory.datasets.store import DatasetStore
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.certificate import certificate_path
from ml_factory.leakage.proof import FULL_CUTS, ProofSpec
from ml_factory.models.registry import find_model_spec
from ml_factory.result import Result
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.workflows.audit_files import Tamper, audit_prepared_files
from ml_factory.workflows.audit_runs import MODELS, audit_finished_models, audit_sample_runs
from ml_factory.workflows.load_prepared import load_certified_dataset, load_dataset
from ml_factory.workflows.prove import find_certificates, proof_leak_table, prove_store, stored_data_settings

data_plots = LazyModule("ml_factory.evaluation.data_plots")  # matplotlib comes with the extra train


@push_workspace_on_exit
def audit(
    workspace: Workspace | str | Path, symbol: str, horizons: Sequence[int] | None = None, *, cuts: int | None = None,
    fresh: bool = False, models: Sequence[str] | None = None, tamper: Tamper | None = None,
) -> Result:  # fmt: skip
    """Prove that nothing prepared or learnt looks ahead, and write the certificates that training requires.

    At 50 moments or more the future is cut off, rewritten and thinned, and all that was known, proven or learnt
    before must stay the same bit for bit; the files that training reads, and small trainings, are compared too. Where
    full certificates of these data and this code are there, nothing is done, unless `fresh`.

    horizons : default: all that are prepared.
    cuts : number of moments; default 50; fewer are the quick form.
    models : models trained on a small sample; default: a booster and a network (xgboost, lstm).
    tamper : checks the audit itself: `tamper(stage, value)` returns the value to use (None: the same object) at the
        stages of `workflows.audit_files.STAGES` (docs/guide.md). `.sentences` names leaks; nothing is written, and
        earlier findings are ignored.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    models = [find_model_spec(name).name for name in models or MODELS]
    store = DatasetStore.current(workspace.processed(symbol))
    horizons = tuple(horizons or store.horizons)
    data = load_dataset(workspace, symbol, horizons[0])  # refuses bars or code that changed since they were prepared
    bars, _ = load_bars(workspace, symbol, stored_data_settings(store).bars)
    spec = ProofSpec(cuts=FULL_CUTS if cuts is None else cuts)
    found = audit_prepared_files(workspace, store, bars, horizons, tamper)
    if not (tamper and found.leaks):
        audit_sample_runs(data, bars, tamper, found, models)
        for horizon in horizons:
            prepared = load_certified_dataset(workspace, symbol, horizon, uncertified=True)
            audit_finished_models(workspace, prepared, tamper, found)
    proof, certificates = None, {}
    if not (tamper and found.leaks):  # one named leak is enough: the cuts are skipped
        # An explicit number of cuts is always run.
        again = fresh or spec.form == "quick" or tamper is not None or found.leaks
        certificates = {} if again else find_certificates(store, horizons, spec.form)
        if not certificates:
            proof, certificates = prove_store(store, bars, horizons, found, spec, write=tamper is None)
    leaks = proof.leaks if proof else found.leaks
    shown = certificates.get(horizons[0])
    cuts_made = [(pd.Timestamp(moment), why) for moment, why in shown.cuts] if shown else []
    paths = [certificate_path(store.folder.parent, store.fingerprint, horizon) for horizon in horizons]
    form, reused = "tampered with: no certificate" if tamper else shown.describe(), proof is None and tamper is None
    compared, sentences = dict(shown.compared) if shown else found.compared, [leak.sentence() for leak in leaks]
    seconds, verdict = time.perf_counter() - started, f"{len(leaks)} leaks" if leaks else "nothing looks ahead"
    how = "proved before" if reused else f"{sum(compared.values()):,} rows compared"
    lines = [
        f"{symbol}, horizons {list(horizons)}: {verdict} ({form}; {how}), {seconds:.1f} s",
        *(f"  {line}" for line in sentences), *([] if tamper else [f"  {paths[0].parent}"]),
    ]  # fmt: skip
    return Result(
        lines, figure=lambda: data_plots.plot_cuts(bars["close"], cuts_made), symbol=symbol, form=form,
        passed=not leaks, horizons=list(horizons), cuts=len(cuts_made),
        disturbances=list(shown.disturbances) if shown else [], compared=compared, leaks=proof_leak_table(leaks),
        sentences=sentences, reused=reused, certificates=[] if tamper else paths, seconds=seconds,
    )  # fmt: skip
