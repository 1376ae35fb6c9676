"""The certificate: what was proved, how hard, and of which bars, code and settings; worth nothing of any others.

processed/{SYMBOL}/certificates/{data set}/h20.json, one for each horizon. The bars are bound by a hash that is chained
over blocks of them, so bars that were appended leave what stood before them proved: only their part is proved again.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path

from ml_factory.data.prefix_hash import PrefixHasher, block_edges
from ml_factory.errors import NotPreparedError
from ml_factory.leakage.proof import Proof
from ml_factory.leakage.tables import Leak
from ml_factory.storage.atomic_files import fingerprint, json_or_none, names_in, to_json_value, write_json

FORMAT = 2
FOLDER = "certificates"


# ---- the certificate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stretch:
    """Bars up to `rows` (from the stretch before on) that were proved in one go.

    hash : of all bars up to there.  until : when the last of them is complete.  cuts : moments tried.
    """

    rows: int
    hash: str
    until: str
    form: str
    cuts: int


@dataclass(frozen=True)
class Certificate:
    """subject : fingerprint of the prepared data set.  code, settings : hashes.  blocks : prefix hashes of the bars.

    history : bars before a cut that a window of the proof needs.  cuts : [moment, kind] of the newest stretch.
    compared : part -> rows compared.  leaks : what was found; empty in one that is worth something.
    """

    symbol: str
    horizon: int
    subject: str
    code: str
    settings: str
    stretches: tuple[Stretch, ...]
    blocks: tuple[str, ...]
    history: int
    cuts: tuple[tuple[str, str], ...]
    disturbances: tuple[str, ...]
    compared: Mapping[str, int]
    leaks: tuple[Leak, ...]

    @property
    def passed(self) -> bool:
        """Whether no leak was found."""
        return not self.leaks

    @property
    def form(self) -> str:
        """full where every stretch is, else quick."""
        return "full" if all(one.form == "full" for one in self.stretches) else "quick"

    def words(self) -> str:
        """For a report: the form, and how far each part of it reaches."""
        if not self.passed:
            return f"FAILED: {len(self.leaks)} leaks, the first in {self.leaks[0].part}, {self.leaks[0].column}"
        if len({one.form for one in self.stretches}) == 1:
            return f"{self.form}, {sum(one.cuts for one in self.stretches)} cuts"
        return ", then ".join(f"{one.form} to {one.until[:16]} ({one.cuts} cuts)" for one in self.stretches)

    def to_dict(self) -> dict:
        """As JSON, with a hash over all of it."""
        stored = to_json_value(asdict(self)) | {"format": FORMAT, "form": self.form, "passed": self.passed}
        return stored | {"hash": fingerprint(stored)}

    @classmethod
    def from_dict(cls, stored: dict) -> "Certificate":
        """Raises KeyError or TypeError where it is not one."""
        names = {item.name for item in fields(cls)}
        given = {name: value for name, value in stored.items() if name in names}
        given["stretches"] = tuple(Stretch(**one) for one in stored["stretches"])
        given["leaks"] = tuple(Leak(**one) for one in stored["leaks"])
        for name in ("blocks", "disturbances"):
            given[name] = tuple(stored[name])
        given["cuts"] = tuple(tuple(cut) for cut in stored["cuts"])
        return cls(**given)


@dataclass(frozen=True)
class CertificateCoverage:
    """What an earlier certificate is still worth for these bars: `rows` of them are proved, in these stretches."""

    rows: int
    stretches: tuple[Stretch, ...]
    history: int


NOTHING = CertificateCoverage(0, (), 0)


def standing(certificate: Certificate, prefixes: PrefixHasher, form: str = "quick") -> CertificateCoverage:
    """The longest prefix of these bars that the certificate proves in this form or a harder one.

    Bars that were revised leave the blocks before them proved.
    """
    if not certificate.passed or certificate.history < 1:
        return NOTHING
    hard = list(takewhile(lambda one: form != "full" or one.form == "full", certificate.stretches))
    while hard and (hard[-1].rows > len(prefixes) or prefixes.hash_of(hard[-1].rows) != hard[-1].hash):
        hard.pop()  # of the longest that is the same, all before it is the same
    if hard:
        return CertificateCoverage(hard[-1].rows, tuple(hard), certificate.history)
    edges = block_edges(min(len(prefixes), certificate.stretches[0].rows))
    same = [k for k, edge in enumerate(edges) if prefixes.hash_of(edge) == certificate.blocks[k]]
    if not same or (form == "full" and certificate.stretches[0].form != "full"):
        return NOTHING
    rows, first = edges[same[-1]], certificate.stretches[0]
    kept = Stretch(rows, prefixes.hash_of(rows), str(prefixes.bars.index[rows - 1]), first.form, first.cuts)
    return CertificateCoverage(rows, (kept,), certificate.history)


def issue(
    proof: Proof, prefixes: PrefixHasher, *, symbol: str, horizon: int, subject: str, code: str, settings: str,
    form: str, before: CertificateCoverage = NOTHING,
) -> Certificate:  # fmt: skip
    """The certificate of these bars: what stood before, and the stretch that this proof adds."""
    new = Stretch(len(prefixes), prefixes.total_hash, str(prefixes.bars.index[-1]), form, len(proof.cuts))
    return Certificate(
        symbol=symbol, horizon=horizon, subject=subject, code=code, settings=settings,
        stretches=(*before.stretches, new) if before.rows < len(prefixes) else before.stretches,
        blocks=tuple(prefixes.at_block_edges(len(prefixes))), history=before.history or proof.history,
        cuts=tuple((cut.moment, cut.why) for cut in proof.cuts),
        disturbances=("truncate", *proof.disturbances), compared=dict(proof.compared), leaks=proof.leaks,
    )  # fmt: skip


# ---- on disk -------------------------------------------------------------------------------------------------------


def place_of(processed: Path, subject: str, horizon: int) -> Path:
    """Where the certificate of this data set and horizon lies.  subject : the data set's fingerprint."""
    return Path(processed) / FOLDER / subject[:12] / f"h{horizon}.json"


def unfinished_of(processed: Path, subject: str) -> Path:
    """Where a proof of this data set keeps what it has tried (`leakage.tried`)."""
    return Path(processed) / FOLDER / subject[:12] / "unfinished.json"


def trainings_of(processed: Path, subject: str) -> Path:
    """Where an audit of this data set keeps what its trainings have shown (`leakage.tried`)."""
    return Path(processed) / FOLDER / subject[:12] / "trainings.json"


def write_certificate(processed: Path, certificate: Certificate) -> Path:
    """Put it in its place; a full one that passed, of the same data and code, is not given up for a quick one."""
    path = place_of(processed, certificate.subject, certificate.horizon)
    there = read_certificate(path)
    same = there is not None and (there.subject, there.code) == (certificate.subject, certificate.code)
    if not (same and there.passed and there.form == "full" and certificate.passed and certificate.form == "quick"):
        write_json(path, certificate.to_dict())
    return path


def read_certificate(path: Path) -> Certificate | None:
    """None where there is none, or where it is not whole: what cannot be read proves nothing.

    Raises UnresponsiveMountError.
    """
    stored = json_or_none(path)
    try:
        content = {name: value for name, value in stored.items() if name != "hash"}
        if stored["format"] != FORMAT or stored["hash"] != fingerprint(content):
            return None
        return Certificate.from_dict(stored)
    except (KeyError, TypeError, AttributeError):
        return None


def newest_standing(
    processed: Path, prefixes: PrefixHasher, horizon: int, *, code: str, settings: str, form: str
) -> CertificateCoverage:
    """The best that any earlier certificate of this symbol, with the same code and settings, still says of these
    bars."""
    best = NOTHING
    for subject in names_in(Path(processed) / FOLDER):
        certificate = read_certificate(place_of(processed, subject, horizon))
        if certificate is None or (certificate.code, certificate.settings) != (code, settings):
            continue
        found = standing(certificate, prefixes, form)
        best = found if found.rows > best.rows else best
    return best


def required(processed: Path, symbol: str, horizon: int, *, subject: str, code: str) -> Certificate:
    """The certificate without which nothing is learnt from this data set.

    Raises NotPreparedError, naming the command, where there is none, where it is of other data or code, or where it
    found a leak.
    """
    path = place_of(processed, subject, horizon)
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
        step = f"mend it, then run: {step}; or train with --uncertified"
        raise NotPreparedError("The pipeline looks ahead", where=path, got=got + more, next_step=step)
    return found
