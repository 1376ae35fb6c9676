"""Results of preparing data, searching barriers and auditing."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ml_factory.evaluation.intervals import WEEKS
from ml_factory.workflows.results.base import Result


@dataclass(frozen=True, kw_only=True)
class PrepareResult(Result):
    """Result of `prepare`.

    bar_findings : a row per finding.
    proof : the certificate in words.
    test_weeks : weeks that the test rows of the last horizon span, as a verdict counts them.
    phases : work of this call, `result_phase_table`.
    staleness : frame -> minutes of age of the frame's newest visible bar (mean, max).
    resumed_from : horizons that were found with the features, where only the rest was prepared now.
    """

    symbol: str
    fingerprint: str
    folder: Path
    market: dict
    rows: int
    features: list[str]
    horizons: list[int]
    label_balance: pd.DataFrame
    split_table: pd.DataFrame
    test_weeks: float
    staleness: dict[str, dict[str, float]]
    bar_findings: pd.DataFrame
    proof: str
    reused: bool
    phases: pd.DataFrame
    resumed_from: list[int] | None = None

    def summary(self) -> str:
        how = "found as prepared before" if self.reused else "prepared now"
        if self.resumed_from is not None:
            kept = f" and horizons {self.resumed_from}" if self.resumed_from else ""
            how = f"features{kept} found there, the rest prepared now"
        return (
            f"{self.symbol}: {self.rows:,} rows x {len(self.features)} features, horizons {self.horizons}, "
            f"{how} in {self.seconds:.1f} s\n"
            f"  test rows span {self.test_weeks:.1f} weeks, a verdict needs {WEEKS}\n"
            f"  proof that nothing looks ahead: {self.proof}\n  {self.folder}"
        )


@dataclass(frozen=True, kw_only=True)
class SearchBarriersResult(Result):
    """Result of `search_barriers`.

    labels : the label spec found; `reused` where it existed before.
    seen_rows : rows that the search saw, as `BarrierSearchRows`.
    grid : a row per point: k, sigma_span, value (bits a training row), rows, class shares, and whether it kept the
        balance.
    """

    symbol: str
    horizon: int
    name: str
    labels: dict
    seen_rows: dict
    best: dict
    grid: pd.DataFrame
    reused: bool
    path: Path

    def summary(self) -> str:
        how = "found before" if self.reused else f"the best of {len(self.grid)}"
        shares = ", ".join(f"{name} {self.best[name]:.1%}" for name in ("short", "neutral", "long"))
        seen = self.seen_rows
        return (
            f"{self.symbol}, horizon {self.horizon}: barriers {self.name}, {how}, {self.seconds:.1f} s\n"
            f"  k_up {self.labels['k_up']:.3f}, k_down {self.labels['k_down']:.3f}, volatility over "
            f"{self.labels['sigma_span']} bars: {shares}\n"
            f"  rows it saw: {seen['count']:,} training rows, {seen['first']} to {seen['last']}, "
            f"bars until {seen['until']}\n  {self.path}"
        )


@dataclass(frozen=True, kw_only=True)
class AuditResult(Result):
    """Result of `audit`.

    form : of the certificate, in words.
    compared : part -> rows compared.
    leaks : a row each, with `sentences`.
    """

    symbol: str
    form: str
    passed: bool
    horizons: list[int]
    cuts: int
    disturbances: list[str]
    compared: dict[str, int]
    leaks: pd.DataFrame
    sentences: list[str]
    reused: bool
    certificates: list[Path]

    def summary(self) -> str:
        how = "proved before" if self.reused else f"{sum(self.compared.values()):,} rows compared"
        verdict = "nothing looks ahead" if self.passed else f"{len(self.leaks)} leaks"
        first = f"{self.symbol}, horizons {self.horizons}: {verdict} ({self.form}; {how}), {self.seconds:.1f} s"
        where = [f"  {self.certificates[0].parent}"] if self.certificates else []
        return "\n".join([first, *(f"  {line}" for line in self.sentences), *where])
