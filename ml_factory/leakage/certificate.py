"""Certificates of the look-ahead proof: of a whole data set, bound to its bars, code and settings, valid for no others.

processed/{SYMBOL}/certificates/{data set}/h20.json, one for each horizon.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.leakage.tables import Leak
from ml_factory.redaction import redact_values
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json, to_json_value

FORMAT = 5
FOLDER = "certificates"


@dataclass(frozen=True)
class Certificate:
    """Result of a proof for one data set and horizon.

    subject : fingerprint of the prepared data set
    bars, code : hashes
    form : "full" or "quick"
    cuts : [moment, kind]
    disturbances : perturbations of the future that were tested
    compared : part -> rows compared
    leaks : detected leaks; empty in a valid certificate
    """

    symbol: str
    horizon: int
    subject: str
    bars: str
    code: str
    form: str
    cuts: tuple[tuple[str, str], ...]
    disturbances: tuple[str, ...]
    compared: Mapping[str, int]
    leaks: tuple[Leak, ...]

    @property
    def passed(self) -> bool:
        """True where no leak was found."""
        return not self.leaks

    def describe(self) -> str:
        """Describe for a report: the form and the number of cuts, or the leaks."""
        if not self.passed:
            return f"FAILED: {len(self.leaks)} leaks, the first in {self.leaks[0].part}, {self.leaks[0].column}"
        return f"{self.form}, {len(self.cuts)} cuts"

    def to_dict(self) -> dict:
        """Return JSON values, with a hash over all of them."""
        stored = redact_values(to_json_value(asdict(self))) | {"format": FORMAT, "passed": self.passed}
        return stored | {"hash": fingerprint_json(stored)}

    @classmethod
    def from_dict(cls, stored: dict) -> "Certificate":
        """Parse a stored certificate; raise KeyError or TypeError where it is none."""
        given = {item.name: stored[item.name] for item in fields(cls)}
        return cls(**given | {
            "leaks": tuple(Leak(**one) for one in stored["leaks"]), "disturbances": tuple(stored["disturbances"]),
            "cuts": tuple(tuple(cut) for cut in stored["cuts"]),
        })  # fmt: skip


def certificate_path(processed: Path, subject: str, horizon: int) -> Path:
    """Return the path of the certificate of this data set and horizon.

    subject : the data set's fingerprint
    """
    return Path(processed) / FOLDER / subject[:12] / f"h{horizon}.json"


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


def stored_certificate(store: DatasetStore, horizon: int) -> Certificate | None:
    """Read the certificate of a prepared data set; None where it is absent or damaged."""
    return read_certificate(certificate_path(store.folder.parent, store.fingerprint, horizon))


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
