"""Certificates of the look-ahead proof: bound to bars, code and settings, not valid for any others.

processed/{SYMBOL}/certificates/{data set}/h20.json, one for each horizon. The bars are bound by a hash chained over
blocks of them, so that after an append the earlier bars stay certified and only the new ones are proved.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path

from ml_factory.data.prefix_hash import PrefixHasher, hash_block_edges
from ml_factory.errors import NotPreparedError
from ml_factory.leakage.proof_result import Proof
from ml_factory.leakage.timed_tables import Leak
from ml_factory.redaction import redact_values
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json, to_json_value

FORMAT = 2
FOLDER = "certificates"


# ---- the certificate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CertifiedStretch:
    """Bars from the end of the previous stretch up to `rows`, proved in one run.

    hash : of all bars up to `rows`
    until : when the last of them is complete
    form : "full" or "quick"
    cuts : number of moments tested
    """

    rows: int
    hash: str
    until: str
    form: str
    cuts: int


@dataclass(frozen=True)
class Certificate:
    """Result of a proof for one data set and horizon.

    subject : fingerprint of the prepared data set
    code, settings : hashes
    stretches : the proved stretches of bars
    blocks : prefix hashes of the bars
    history : bars before a cut that a window of the proof needs
    cuts : [moment, kind] of the newest stretch
    disturbances : perturbations of the future that were tested
    compared : part -> rows compared
    leaks : detected leaks; empty in a valid certificate
    """

    symbol: str
    horizon: int
    subject: str
    code: str
    settings: str
    stretches: tuple[_CertifiedStretch, ...]
    blocks: tuple[str, ...]
    history: int
    cuts: tuple[tuple[str, str], ...]
    disturbances: tuple[str, ...]
    compared: Mapping[str, int]
    leaks: tuple[Leak, ...]

    @property
    def passed(self) -> bool:
        """True where no leak was found."""
        return not self.leaks

    @property
    def form(self) -> str:
        """ "full" where every stretch is, else "quick"."""
        return "full" if all(one.form == "full" for one in self.stretches) else "quick"

    def describe(self) -> str:
        """Describe for a report: the form, and the range of bars of each form."""
        if not self.passed:
            return f"FAILED: {len(self.leaks)} leaks, the first in {self.leaks[0].part}, {self.leaks[0].column}"
        if len({one.form for one in self.stretches}) == 1:
            return f"{self.form}, {sum(one.cuts for one in self.stretches)} cuts"
        return ", then ".join(f"{one.form} to {one.until[:16]} ({one.cuts} cuts)" for one in self.stretches)

    def to_dict(self) -> dict:
        """Return JSON values, with a hash over all of them."""
        stored = redact_values(to_json_value(asdict(self))) | {
            "format": FORMAT,
            "form": self.form,
            "passed": self.passed,
        }
        return stored | {"hash": fingerprint_json(stored)}

    @classmethod
    def from_dict(cls, stored: dict) -> "Certificate":
        """Parse a stored certificate; raise KeyError or TypeError where it is none."""
        names = {item.name for item in fields(cls)}
        given = {name: value for name, value in stored.items() if name in names}
        given["stretches"] = tuple(_CertifiedStretch(**one) for one in stored["stretches"])
        given["leaks"] = tuple(Leak(**one) for one in stored["leaks"])
        for name in ("blocks", "disturbances"):
            given[name] = tuple(stored[name])
        given["cuts"] = tuple(tuple(cut) for cut in stored["cuts"])
        return cls(**given)


@dataclass(frozen=True)
class _CertificateCoverage:
    """The bars that an earlier certificate covers: `rows` of them, in these stretches."""

    rows: int
    stretches: tuple[_CertifiedStretch, ...]
    history: int


NO_COVERAGE = _CertificateCoverage(0, (), 0)


def certificate_coverage(certificate: Certificate, prefixes: PrefixHasher, form: str = "quick") -> _CertificateCoverage:
    """Return the longest prefix of these bars that the certificate proves in this form or a stronger one.

    Where bars were revised, the blocks before them stay covered.
    """
    if not certificate.passed or certificate.history < 1:
        return NO_COVERAGE
    hard = list(takewhile(lambda one: form != "full" or one.form == "full", certificate.stretches))
    while hard and (hard[-1].rows > len(prefixes) or prefixes.hash_prefix(hard[-1].rows) != hard[-1].hash):
        hard.pop()  # equal hashes of a prefix imply equal hashes of every shorter prefix
    if hard:
        return _CertificateCoverage(hard[-1].rows, tuple(hard), certificate.history)
    edges = hash_block_edges(min(len(prefixes), certificate.stretches[0].rows))
    same = [k for k, edge in enumerate(edges) if prefixes.hash_prefix(edge) == certificate.blocks[k]]
    if not same or (form == "full" and certificate.stretches[0].form != "full"):
        return NO_COVERAGE
    rows, first = edges[same[-1]], certificate.stretches[0]
    kept = _CertifiedStretch(
        rows, prefixes.hash_prefix(rows), str(prefixes.bars.index[rows - 1]), first.form, first.cuts
    )
    return _CertificateCoverage(rows, (kept,), certificate.history)


def issue_certificate(
    proof: Proof, prefixes: PrefixHasher, *, symbol: str, horizon: int, subject: str, code: str, settings: str,
    form: str, before: _CertificateCoverage = NO_COVERAGE,
) -> Certificate:  # fmt: skip
    """Return the certificate of these bars: the covered stretches, and the one that this proof adds."""
    new = _CertifiedStretch(len(prefixes), prefixes.total_hash, str(prefixes.bars.index[-1]), form, len(proof.cuts))
    return Certificate(
        symbol=symbol, horizon=horizon, subject=subject, code=code, settings=settings,
        stretches=(*before.stretches, new) if before.rows < len(prefixes) else before.stretches,
        blocks=tuple(prefixes.block_hashes(len(prefixes))), history=before.history or proof.history,
        cuts=tuple((cut.moment, cut.why) for cut in proof.cuts),
        disturbances=("truncate", *proof.disturbances), compared=dict(proof.compared), leaks=proof.leaks,
    )  # fmt: skip


# ---- on disk -------------------------------------------------------------------------------------------------------


def certificate_path(processed: Path, subject: str, horizon: int) -> Path:
    """Return the path of the certificate of this data set and horizon.

    subject : the data set's fingerprint
    """
    return Path(processed) / FOLDER / subject[:12] / f"h{horizon}.json"


def proof_progress_path(processed: Path, subject: str) -> Path:
    """Return the path of the saved progress of a proof of this data set (`leakage.progress_file`)."""
    return Path(processed) / FOLDER / subject[:12] / "unfinished.json"


def audit_trainings_path(processed: Path, subject: str) -> Path:
    """Return the path where an audit saves the results of its trainings (`leakage.progress_file`)."""
    return Path(processed) / FOLDER / subject[:12] / "trainings.json"


def write_certificate(processed: Path, certificate: Certificate) -> Path:
    """Write it, unless a full one of the same data and code passed and this one is only quick."""
    path = certificate_path(processed, certificate.subject, certificate.horizon)
    stored = read_certificate(path)
    same = stored is not None and (stored.subject, stored.code) == (certificate.subject, certificate.code)
    if not (same and stored.passed and stored.form == "full" and certificate.passed and certificate.form == "quick"):
        files.write_json(path, certificate.to_dict())
    return path


def read_certificate(path: Path) -> Certificate | None:
    """Read a certificate; None where it is absent or damaged."""
    stored = files.read_json_or_none(path)
    try:
        content = {name: value for name, value in stored.items() if name != "hash"}
        if stored["format"] != FORMAT or stored["hash"] != fingerprint_json(content):
            return None
        return Certificate.from_dict(stored)
    except (KeyError, TypeError, AttributeError):
        return None


def best_certificate_coverage(
    processed: Path, prefixes: PrefixHasher, horizon: int, *, code: str, settings: str, form: str
) -> _CertificateCoverage:
    """Return the widest coverage of these bars by any certificate of this symbol with equal code and settings."""
    best = NO_COVERAGE
    for subject in files.names(Path(processed) / FOLDER):
        certificate = read_certificate(certificate_path(processed, subject, horizon))
        if certificate is None or (certificate.code, certificate.settings) != (code, settings):
            continue
        found = certificate_coverage(certificate, prefixes, form)
        best = found if found.rows > best.rows else best
    return best


def require_certificate(processed: Path, symbol: str, horizon: int, *, subject: str, code: str) -> Certificate:
    """Return the certificate that training on this data set requires.

    Raises NotPreparedError with the command to run where it is absent, of other data or code, or has a leak.
    """
    path = certificate_path(processed, subject, horizon)
    found = read_certificate(path)
    step = f"python -m ml_factory audit --symbol {symbol}"
    again = f"run: python -m ml_factory prepare --symbol {symbol} (the quick proof) or {step} (the full one); "
    again += "or train with --uncertified"
    if found is None or found.subject != subject or found.horizon != horizon:
        raise NotPreparedError("This data has no certificate that it does not look ahead", where=path, next_step=again)
    if found.code != code:
        raise NotPreparedError("The certificate is of other code than this", where=path, next_step=again)
    if not found.passed:
        got = found.leaks[0].sentence()
        more = f" and {len(found.leaks) - 1} more" if len(found.leaks) > 1 else ""
        step = f"correct it, then run: {step}; or train with --uncertified"
        raise NotPreparedError("The pipeline looks ahead", where=path, got=got + more, next_step=step)
    return found
