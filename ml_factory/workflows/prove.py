"""The look-ahead proof of a prepared data set: quick at the end of `prepare`, full in `audit`; it writes
certificates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.store import DatasetStore
from ml_factory.features import custom
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.certificate import (
    Certificate,
    certificate_path,
    read_certificate,
    require_certificate,
    write_certificate,
)
from ml_factory.leakage.custom_feature_check import check_custom_features
from ml_factory.leakage.pipeline_under_test import SplitUnderTest, StandardPipelineUnderTest
from ml_factory.leakage.prefix_builds import EARLIER, PrefixBuild, build_pipeline_on_prefixes
from ml_factory.leakage.proof import prove_no_look_ahead
from ml_factory.leakage.proof_result import Proof
from ml_factory.leakage.proof_spec import QUICK, ProofSpec
from ml_factory.leakage.split_and_fit_check import check_splits_are_purged
from ml_factory.leakage.timed_tables import (
    Leak,
    TimedTable,
    one_per_column,
    timed_table_of_coarse_bars,
    timed_table_of_labels,
)
from ml_factory.settings import DataSpec, certified_code_hash
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec

Progress = Callable[[int, int], None]
FOLDS = 10  # per scheme in a full proof: 76 splits a horizon with combinations of two


@dataclass(frozen=True)
class ProofOutcome:
    """Result of a proof.

    proof : the checks of this call; None where the certificates that are there cover all of them.
    certificates : horizon -> certificate.
    """

    proof: Proof | None
    certificates: Mapping[int, Certificate]


def prove_store(
    store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], spec: ProofSpec = QUICK, *,
    fresh: bool = False, also: Sequence[Leak] = (), compared: Mapping[str, int] | None = None,
    progress: Progress | None = None, seen: Sequence[PrefixBuild] = (), write: bool = True,
) -> ProofOutcome:  # fmt: skip
    """Prove a prepared data set, unless its certificates do already, and write the certificates.

    bars : the checked bars the data set was made of.
    fresh : prove again.
    also, compared : leaks found by other checks, and their counts (part -> rows).
    seen : builds on the first bars alone, made before this process read the later ones.
    write : False: no certificate is written.
    """
    settings, processed, symbol = stored_data_settings(store), store.folder.parent, store.facts["symbol"]
    if not fresh and not also and (existing := _proved(store, horizons, spec.form)):
        return ProofOutcome(None, existing)
    pipeline = pipeline_to_prove(symbol, settings, horizons, folds=FOLDS if spec.form == "full" else 0)
    facts = store.facts["market"]
    if spec == QUICK and not settings.features.custom:
        spec = replace(spec, unseen_bars=0)  # the library's own columns keep no state
    with custom.stateless_custom_features():
        proof = prove_no_look_ahead(
            pipeline, bars, spec, facts=facts, progress=progress, prefix_builds=seen,
            whole=lambda: _stored_tables_to_prove(store, pipeline, bars, facts),
        )  # fmt: skip
    rows, found = check_custom_features(bars, facts, settings.features, quick=spec.form == "quick", seed=spec.seed)
    own = {"features, rows of sampled days": rows} if rows else {}
    leaks = (*proof.leaks, *_leaks_of_stored_splits(store, horizons, settings), *found, *also)
    proof = replace(proof, leaks=one_per_column(leaks), compared={**proof.compared, **own, **(compared or {})})
    certificates = {
        horizon: Certificate(
            symbol, horizon, store.fingerprint, store.facts["raw"]["bars"], certified_code_hash(), spec.form,
            tuple((cut.moment, cut.why) for cut in proof.cuts), ("truncate", *proof.disturbances),
            dict(proof.compared), proof.leaks,
        ) for horizon in horizons
    }  # fmt: skip
    for certificate in certificates.values() if write else ():
        write_certificate(processed, certificate)
    return ProofOutcome(proof, certificates)


def _proved(store: DatasetStore, horizons: Sequence[int], form: str) -> dict[int, Certificate]:
    """Return the certificates of these horizons where each is of this code, passed, and as strong; {} otherwise."""
    found, code = {}, certified_code_hash()
    for horizon in horizons:
        one = read_certificate(certificate_path(store.folder.parent, store.fingerprint, horizon))
        if one is None or not one.passed or (one.subject, one.code) != (store.fingerprint, code):
            return {}
        if form == "full" != one.form:
            return {}
        found[horizon] = one
    return found


def build_prefixes_to_prove(settings: DataSpec, symbol: str, bars: pd.DataFrame, facts: dict) -> list[PrefixBuild]:
    """Build data on the first bars alone, before this process builds all, where custom features may keep state."""
    if not settings.features.custom:
        return []
    return build_pipeline_on_prefixes(
        pipeline_to_prove(symbol, settings, (), folds=0), bars, facts, QUICK.unseen_bars, EARLIER
    )


def pipeline_to_prove(
    symbol: str, settings: DataSpec, horizons: Sequence[int], folds: int = FOLDS
) -> StandardPipelineUnderTest:
    """Return the pipeline that `prepare` runs with these settings."""
    given = {name: getattr(settings, name) for name in ("calendar", "tick") if getattr(settings, name) is not None}
    given["bar_minutes"] = settings.bars.minutes or 1
    labels = tuple(settings.label_spec_for(horizon) for horizon in horizons)
    return StandardPipelineUnderTest(
        symbol, settings.features, labels, settings.splits, given, folds, settings.preprocess
    )


def stored_data_settings(store: DatasetStore) -> DataSpec:
    """Return the settings a data set was prepared with."""
    stored = dict(store.facts["settings"])
    kinds = {"bars": RawBarSpec, "features": FeatureSpec, "labels": LabelSpec, "splits": SplitSpec}
    return DataSpec(**stored | {name: kind(**stored[name]) for name, kind in kinds.items()})


def _stored_tables_to_prove(
    store: DatasetStore, pipeline: StandardPipelineUnderTest, bars: pd.DataFrame, facts: dict
) -> dict[str, TimedTable]:
    """Return the feature rows as stored, and frames and labels rebuilt from these bars."""
    known_at = store.known_at.as_unit("ns").asi8
    tables = {"features": TimedTable(known_at, known_at, names=tuple(store.feature_names), matrix=store.values)}
    frames = pipeline.coarse_frames(bars, facts)
    tables |= {f"frame {name}": timed_table_of_coarse_bars(frame) for name, frame in frames.items()}
    return tables | {
        f"labels {name}": timed_table_of_labels(made) for name, made in pipeline.labels(bars, facts).items()
    }


def _leaks_of_stored_splits(store: DatasetStore, horizons: Sequence[int], settings: DataSpec) -> list[Leak]:
    """Check the purge and embargo rule of the splits on the rows that training reads."""
    found = []
    for horizon in horizons:
        split = SplitUnderTest("stored", store.load_splits(horizon), settings.splits.embargo_bars)
        found += check_splits_are_purged(store.load_labels(horizon), [split], f"h{horizon}")
    return found


def require_proved_data(processed: Path, symbol: str, horizon: int, subject: str, uncertified: bool) -> None:
    """Refuse data without a certificate of this code, unless `uncertified`.

    Raises NotPreparedError, naming the command.
    """
    if not uncertified:
        require_certificate(processed, symbol, horizon, subject=subject, code=certified_code_hash())


def describe_proof_of_store(store: DatasetStore, horizon: int) -> str:
    """Describe the certificate of a data set for a report."""
    found = read_certificate(certificate_path(store.folder.parent, store.fingerprint, horizon))
    return found.describe() if found else "none: uncertified"


def proof_leak_table(leaks: Sequence[Leak]) -> pd.DataFrame:
    """Return the leaks as a table: part, column, rows, cut, disturbance and the place of the first difference."""
    columns = ["part", "column", "rows", "first_row", "size", "cut", "why", "disturbance", "scope", "cuts"]
    table = pd.DataFrame([leak.to_dict() for leak in leaks], columns=columns)
    return table.assign(size=table["size"].astype(np.float64)) if len(table) else table
