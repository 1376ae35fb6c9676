"""A hash of rows in any order, equal to the one that PostgreSQL computes of its own rows.

Each value is hashed with the number of its column as the seed, the hashes of a row are joined by XOR, and the rows are
added up. `postgres_hash_sql` is that sum in SQL, with the functions by which PostgreSQL distributes rows over hash
partitions (`hashint8extended`, `hashfloat8extended`, `timestamp_hash_extended`; the same since version 11).
"""

import hashlib

import numpy as np
import pyarrow

from ml_factory.data.databases.columns import Column

_START = 0x9E3779B9 + 3923095  # and the number of bytes
_ROTATIONS = (14, 11, 25, 16, 4, 14, 24)
_MIXING = (4, 6, 8, 16, 19, 4)
_POSTGRES_EPOCH = 946_684_800_000_000  # microseconds since 1970 at which PostgreSQL's times begin
_U32 = np.uint32


def _rotate(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << _U32(bits)) | (x >> _U32(32 - bits))


def _final(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return int64[N] of three uint32[N]: the last step of Jenkins' lookup3."""
    words = [a, b, c]
    for step, bits in enumerate(_ROTATIONS):  # c by b, a by c, b by a, and so on
        into, by = (2 - 2 * step) % 3, (1 - 2 * step) % 3
        words[into] = (words[into] ^ words[by]) - _rotate(words[by], bits)
    return ((words[1].astype(np.uint64) << np.uint64(32)) | words[2]).view(np.int64)


def _started(length: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the state before the first word: three uint32[1]."""
    words = [np.array([(_START + length) & 0xFFFFFFFF], _U32) for _ in range(3)]
    if seed:
        words[0] = words[0] + _U32((seed >> 32) & 0xFFFFFFFF)
        words[1] = words[1] + _U32(seed & 0xFFFFFFFF)
        for step, bits in enumerate(_MIXING):  # a by c, b by a, c by b, twice
            one, other, third = step % 3, (step + 2) % 3, (step + 1) % 3
            words[one] = (words[one] - words[other]) ^ _rotate(words[other], bits)
            words[other] = words[other] + words[third]
    return words[0], words[1], words[2]


def hash_integers(values: np.ndarray, seed: int) -> np.ndarray:
    """Return int64[N] of int64[N]: PostgreSQL's hashint8extended."""
    bits = np.ascontiguousarray(values, np.int64).view(np.uint64)
    low, high = bits.astype(_U32), (bits >> np.uint64(32)).astype(_U32)
    a, b, c = _started(4, seed)
    with np.errstate(over="ignore"):
        a = a + (low ^ np.where(values >= 0, high, ~high))
        return _final(a, np.broadcast_to(b, a.shape), np.broadcast_to(c, a.shape))


def hash_floats(values: np.ndarray, seed: int) -> np.ndarray:
    """Return int64[N] of float64[N]: PostgreSQL's hashfloat8extended, in which both zeros are equal, and all NaNs."""
    values = np.where(np.isnan(values), np.nan, values)
    bits = np.ascontiguousarray(values, "<f8").view("<u4").reshape(-1, 2)
    a, b, c = _started(8, seed)
    with np.errstate(over="ignore"):
        hashed = _final(a + bits[:, 0], b + bits[:, 1], np.broadcast_to(c, len(values)))
    return np.where(values == 0, np.int64(seed), hashed)


def hash_texts(values: pyarrow.Array, seed: int) -> np.ndarray:
    """Return int64[N] of a text column: hashint8extended of the first eight bytes of each text's MD5."""
    coded = values.dictionary_encode()
    short = [
        int.from_bytes(hashlib.md5((text or "").encode(), usedforsecurity=False).digest()[:8], "big", signed=True)
        for text in coded.dictionary.to_pylist()
    ]
    codes = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return hash_integers(np.array(short or [0], np.int64)[codes], seed)


def hash_of_null(seed: int) -> int:
    """Return the hash of an absent value, an integer of 64 bits unrelated to that of any other value."""
    return int.from_bytes(hashlib.sha256(f"null {seed}".encode()).digest()[:8], "big", signed=True)


def hash_rows(batch: pyarrow.RecordBatch, columns: list[Column]) -> int:
    """Return the sum of the hashes of the rows; sums of batches add up to that of all rows."""
    rows = np.zeros(batch.num_rows, np.int64)
    for seed, (values, column) in enumerate(zip(batch.columns, columns, strict=True)):
        if column.kind == "text":
            hashed = hash_texts(values, seed)
        elif column.kind == "float":
            hashed = hash_floats(values.fill_null(0.0).to_numpy(zero_copy_only=False), seed)
        else:
            whole = values.cast(pyarrow.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            hashed = hash_integers(whole - _POSTGRES_EPOCH if column.kind in ("utc", "time") else whole, seed)
        absent = values.is_null().to_numpy(zero_copy_only=False)
        rows ^= np.where(absent, np.int64(hash_of_null(seed)), hashed) if values.null_count else hashed
    return (int((rows >> 32).sum()) << 32) + int((rows & 0xFFFFFFFF).sum())


def format_content_hash(total: int) -> str:
    """Return a sum of row hashes as 32 hex digits."""
    return f"{total % (1 << 128):032x}"


def postgres_hash_sql(columns: list[Column], names: list[str]) -> str:
    """Return the sum over the rows as SQL. names : SQL of each column's value."""
    forms = {
        "utc": "timestamp_hash_extended(timezone(interval '0', {0}), {1})", "time": "timestamp_hash_extended({0}, {1})",
        "integer": "hashint8extended({0}, {1})", "float": "hashfloat8extended({0}, {1})",
        "boolean": "hashint8extended({0}::int::bigint, {1})",
        "text": "hashint8extended(('x' || left(md5(convert_to({0}, 'UTF8')), 16))::bit(64)::bigint, {1})",
    }  # fmt: skip
    terms = [
        f"coalesce({forms[column.kind].format(name, seed)}, {hash_of_null(seed)})"
        for seed, (column, name) in enumerate(zip(columns, names, strict=True))
    ]
    return f"sum({' # '.join(terms)})"
