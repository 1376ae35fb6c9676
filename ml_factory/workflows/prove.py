"""The look-ahead proof of a prepared data set: quick at the end of `prepare`, full in `audit`; it writes
certificates.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.blind import Split, find_unpurged_rows
from ml_factory.leakage.certificate import (
    Certificate,
    certificate_path,
    read_certificate,
    write_certificate,
)
from ml_factory.leakage.custom import check_custom_features
from ml_factory.leakage.proof import QUICK, ProofSpec, prove
from ml_factory.leakage.tables import Findings, Leak, Table
from ml_factory.settings import DataSpec, certified_code_hash
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec
from ml_factory.workflows.build import DataUnderProof

FOLDS = 10  # per scheme in a full proof: 76 splits a horizon with combinations of two


def prove_store(
    store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], also: Findings, spec: ProofSpec = QUICK, *,
    write: bool = True,
) -> tuple[Findings, dict[int, Certificate]]:  # fmt: skip
    """Prove a prepared data set, and write the certificates; return all that was found, and horizon -> certificate.

    bars : the checked bars the data set was made of.
    also : what other checks found.
    write : False: no certificate is written.
    """
    settings, symbol = stored_data_settings(store), store.facts["symbol"]
    subject = DataUnderProof(symbol, settings, tuple(horizons), FOLDS if spec.form == "full" else 0)
    if settings.features.custom:  # no feed computes them
        spec = replace(spec, features=True)
    facts, rows = store.facts["market"], store.load_features()
    stored = Table(rows, rows.index.as_unit("ns").asi8)
    found = prove(subject, bars, spec, facts=facts, features=stored)
    for horizon in horizons:
        split = Split("stored", store.load_splits(horizon), settings.splits.embargo_bars)
        found.add(find_unpurged_rows(store.load_labels(horizon), split, f"split h{horizon}"))
    found.merge(check_custom_features(bars, facts, settings.features, quick=spec.form == "quick"))
    found.merge(also)
    certificates = {
        horizon: Certificate(
            symbol, horizon, store.fingerprint, store.facts["raw"]["bars"], certified_code_hash(), spec.form,
            tuple((cut.moment, cut.why) for cut in found.cuts), ("truncate", *spec.ways), found.compared, found.leaks,
        ) for horizon in horizons
    }  # fmt: skip
    for certificate in certificates.values() if write else ():
        write_certificate(store.folder.parent, certificate)
    return found, certificates


def find_certificates(store: DatasetStore, horizons: Sequence[int], form: str) -> dict[int, Certificate]:
    """Return the certificates of these horizons where each is of this code, passed, and as strong; {} otherwise."""
    code, folder = certified_code_hash(), store.folder.parent
    found = {horizon: read_certificate(certificate_path(folder, store.fingerprint, horizon)) for horizon in horizons}
    proved = all(
        one is not None and one.passed and (one.subject, one.code) == (store.fingerprint, code)
        and form in ("quick", one.form) for one in found.values()
    )  # fmt: skip
    return found if proved else {}


def stored_data_settings(store: DatasetStore) -> DataSpec:
    """Return the settings a data set was prepared with."""
    stored = dict(store.facts["settings"])
    kinds = {"bars": RawBarSpec, "features": FeatureSpec, "labels": LabelSpec, "splits": SplitSpec}
    return DataSpec(**stored | {name: kind(**stored[name]) for name, kind in kinds.items()})


def describe_proof_of_store(store: DatasetStore, horizon: int) -> str:
    """Describe the certificate of a data set for a report."""
    found = read_certificate(certificate_path(store.folder.parent, store.fingerprint, horizon))
    return found.describe() if found else "none: uncertified"


def proof_leak_table(leaks: Sequence[Leak]) -> pd.DataFrame:
    """Return the leaks as a table: part, column, rows, cut, disturbance and the place of the first difference."""
    columns = ["part", "column", "rows", "first_row", "size", "cut", "why", "disturbance", "scope", "cuts"]
    table = pd.DataFrame([leak.to_dict() for leak in leaks], columns=columns)
    return table.assign(size=table["size"].astype(np.float64)) if len(table) else table
