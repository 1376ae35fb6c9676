"""The look-ahead proof of a prepared data set: quick at the end of `prepare`, full in `audit`; it writes certificates.

The stored files are compared with what the code computes from the bars, bit for bit. Each compared value first passes
through `tamper`, so that a caller can test the check itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.bar_report import hash_bars
from ml_factory.data.sessions import PRICES, MarketSpec
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.datasets.scaling import SCALERS
from ml_factory.datasets.store import DatasetStore
from ml_factory.features import custom
from ml_factory.leakage.blind import Split, find_unpurged_rows
from ml_factory.leakage.certificate import Certificate, stored_certificate, write_certificate
from ml_factory.leakage.custom import check_custom_features
from ml_factory.leakage.proof import ProofSpec, prove
from ml_factory.leakage.tables import ROWS, Findings, Table, compare, compare_states, mismatch
from ml_factory.progress import progress_phase
from ml_factory.seeding import seeded_generator
from ml_factory.settings import certified_code_hash
from ml_factory.storage.workspace import Workspace, require_raw_bars
from ml_factory.targets.splits import SplitSpec, chronological_split
from ml_factory.workflows.build import Built, DataUnderProof, build
from ml_factory.workflows.prepared_dataset import (
    SPLITS,
    PreparedDataset,
    load_certified_dataset,
    load_dataset_of_store,
    stored_data_settings,
)

FOLDS = 10  # per scheme in a full proof: 76 splits a horizon with combinations of two
QUICK_COLUMNS = 12  # of a stored scaler, refitted at the end of `prepare`; an audit refits all of them


def prove_store(
    store: DatasetStore,
    bars: pd.DataFrame,
    horizons: Sequence[int],
    found: Findings,
    spec: ProofSpec,
    built: Built | None = None,
) -> dict[int, Certificate]:
    """Prove a prepared data set, and write the certificates; return horizon -> certificate.

    bars : the checked bars the data set was made of.
    found : what other checks found, to be added to; where these were tampered with, no certificate is written.
    built : what `build` made of these bars, without the features, which are read from the store.
    """
    settings, symbol = stored_data_settings(store), store.facts["symbol"]
    subject = DataUnderProof(symbol, settings, tuple(horizons), FOLDS if spec.form == "full" else 0)
    if settings.features.custom:  # no feed computes them
        spec = replace(spec, thorough=True)
    if built and {*built.labels} != {*horizons}:  # others are stored already
        built = None
    facts, rows = store.facts["market"], store.load_features()
    features = Table(rows, rows.index.as_unit("ns").asi8)
    prove(subject, bars, spec, facts=facts, features=features, built=built, found=found)
    for horizon in horizons:
        with progress_phase(f"stored split {horizon}"):
            split = Split("stored", store.load_splits(horizon), settings.splits.embargo_bars)
            found.add(find_unpurged_rows(store.load_labels(horizon), split, f"split h{horizon}"))
    check_custom_features(bars, facts, settings.features, quick=spec.form == "quick", found=found)
    code = certified_code_hash()
    certificates = {
        horizon: Certificate(
            symbol, horizon, store.fingerprint, store.facts["raw"]["bars"], code, spec.form,
            tuple((cut.moment, cut.why) for cut in found.cuts), ("truncate", *spec.ways), found.compared, found.leaks,
        ) for horizon in horizons
    }  # fmt: skip
    for certificate in () if found.tamper else certificates.values():
        write_certificate(store.folder.parent, certificate)
    return certificates


def find_certificates(store: DatasetStore, horizons: Sequence[int], form: str) -> dict[int, Certificate]:
    """Return the certificates of these horizons where each is of this code, passed, and as strong; {} otherwise."""
    code, found = certified_code_hash(), {}
    for horizon in horizons:
        one = stored_certificate(store, horizon)
        about = one and (one.subject, one.horizon, one.code)
        if about != (store.fingerprint, horizon, code) or not one.passed or form not in ("quick", one.form):
            return {}
        found[horizon] = one
    return found


def describe_proof_of_store(store: DatasetStore, horizon: int) -> str:
    """Describe the certificate of a data set for a report."""
    found = stored_certificate(store, horizon)
    return found.describe() if found else "none: uncertified"


# ---- the stored files ------------------------------------------------------------------------------------------------


def audit_prepared_files(
    workspace: Workspace, store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], found: Findings
) -> None:
    """Compare all that is stored and read by training with its reference: bars, rows, splits, scalers, data sets."""
    _audit_bars(workspace, store, bars, found)
    _audit_rows(store, bars, horizons, found)
    for horizon in horizons:
        _audit_scaler(store, horizon, found)
        data = load_certified_dataset(workspace, store.facts["symbol"], horizon, uncertified=True)  # as trainings do
        _audit_dataset(data, store, found)


def quick_audit_of_files(store: DatasetStore, horizons: Sequence[int]) -> Findings:
    """Run the last check of `prepare`: refit some columns of each stored scaler."""
    found = Findings()
    for horizon in horizons:
        _audit_scaler(store, horizon, found, columns=QUICK_COLUMNS)
    return found


def _audit_bars(workspace: Workspace, store: DatasetStore, bars: pd.DataFrame, found: Findings) -> None:
    """Compare the bars that the pipeline reads with the stored hash, and with the rows of the raw file."""
    settings, symbol = stored_data_settings(store).bars, store.facts["symbol"]
    found.count("bars", len(bars))
    given = found.given("bars", bars)
    if given is not bars:
        found.add(compare("bars", given, bars, "the raw file's checked bars"))
    if hash_bars(given) != store.facts["raw"]["bars"]:
        found.add([mismatch("bars", ROWS, len(bars), bars.index[0], "the bars that the data set was made of")])
    raw = read_bars_table(require_raw_bars(workspace, symbol))
    plain = replace(settings, strict=False, minutes=None) == RawBarSpec() and {"timestamp", *PRICES} <= set(raw.columns)
    # An import writes float64; float32 is read to its shortest decimals, and text may be in any notation.
    exact = plain and all(raw[name].dtype == np.float64 or raw[name].dtype.kind in "iu" for name in PRICES)
    if exact and isinstance(raw["timestamp"].dtype, pd.DatetimeTZDtype):
        raw = raw.set_index("timestamp")[[*PRICES]]
        raw = raw[~raw.index.duplicated(keep="last")].reindex(given.index)
        if not raw["close"].isna().any():  # end-stamped bars cannot be joined by start time
            reference = "the raw file's rows of the same minute"
            found.add(compare("bars", given[[*PRICES]], raw.astype(np.float64), reference))


def _audit_rows(store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], found: Findings) -> None:
    """Compare stored features and labels with those rebuilt from the bars, and splits with their rule, on every row."""
    settings = stored_data_settings(store)
    with custom.stateless_custom_features():
        built = build(bars, MarketSpec.from_dict(store.facts["market"]), settings, horizons)
    wanted = built.features.to_frame()
    given = found.given("features", store.load_features())
    found.count("stored features", wanted.size)
    found.add(compare("features", given, wanted, "the features rebuilt from the bars"))
    for horizon, made in built.labels.items():
        made, labels = made[made["entry_bar"] >= store.facts["first"]], store.load_labels(horizon)
        labels.attrs["horizon"] = horizon
        given = found.given("labels", labels)
        found.count(f"stored labels h{horizon}", len(made))
        reference = "the labels rebuilt from the bars"
        found.add(compare(f"labels h{horizon}", given, made, reference, extra=True))
        _audit_splits(labels, store.load_splits(horizon), settings.splits, horizon, found)


def _audit_splits(labels: pd.DataFrame, splits: Mapping, spec: SplitSpec, horizon: int, found: Findings) -> None:
    """Compare stored splits with the rule of purge and embargo, and with a new split of the stored labels."""
    given, part = found.given("splits", splits), f"splits h{horizon}"
    found.count(part, len(labels))
    if set(given) == set(SPLITS) and all(map(len, given.values())):
        roles = {name: np.asarray(rows) for name, rows in given.items()}
        if all(rows.min() >= 0 and rows.max() < len(labels) for rows in roles.values()):
            found.add(find_unpurged_rows(labels, Split("stored", roles, spec.embargo_bars), f"split h{horizon}"))
    found.add(compare_states(part, "split", given, chronological_split(labels, spec), "the rule of the split"))


def _audit_scaler(store: DatasetStore, horizon: int, found: Findings, *, columns: int | None = None) -> None:
    """Refit the stored scaler, and the steps before it, on the stored training rows and compare.

    columns : number of adjacent columns of a lone scaler to compare, drawn at random; None: all.
    """
    steps = stored_data_settings(store).preprocess
    given = found.given("scaler", store.load_scaler(horizon))
    given = given if isinstance(given, dict) else given.to_dict()
    with progress_phase(f"refitting scaler {horizon}") as done:
        train = store.load_label_moments(horizon)[store.load_splits(horizon)["train"]]
        rows, values, features = store.known_at.searchsorted(train), store.values, len(store.feature_names)
        if columns and len(steps) == 1 and steps[0] in SCALERS and features > columns:
            first = int(seeded_generator("scaler columns", horizon).integers(features - columns + 1))
            some = slice(first, first + columns)
            values, numbers = values[:, some], [name for name in ("center", "scale", "knots") if name in given]
            given = {**given, **{name: given[name][some] for name in numbers}}
        done(len(rows))
        wanted = fit_preprocessing_steps(steps, values, rows)
    part = f"scaler h{horizon}"
    found.count(part, len(rows))
    found.add(compare_states(part, "scaler", given, wanted, "the steps refitted on the training rows"))


def _audit_dataset(data: PreparedDataset, store: DatasetStore, found: Findings) -> None:
    """Compare the data set that training gets with the stored files."""
    given, part = found.given("dataset", data), f"dataset h{data.horizon}"
    wanted = load_dataset_of_store(store, data.horizon)
    found.count(part, wanted.features.size)
    for name in ("features", "labels"):
        found.add(compare(f"{part}, {name}", getattr(given, name), getattr(wanted, name), "the stored one"))
    for name in ("splits", "scaler", "segment", "close", "symbol", "horizon", "fingerprint", "settings"):
        found.add(compare_states(part, name, getattr(given, name), getattr(wanted, name), "the stored one"))
