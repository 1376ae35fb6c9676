"""JSON that anyone may have written: strict, bounded in size, depth, digits and values, and one line where refused."""

import json
import re

import pytest

from ml_factory.storage.json_values import check_nesting, parse_json
from tests.limited_reading import _ROOT, read_with_limits

HOSTILE = {
    "NaN": b'{"a": NaN}',
    "an infinity": b"[-Infinity]",
    "a number that is infinite": b"[1e999]",
    "lists in lists": b"[" * 10_000 + b"]" * 10_000,
    "lists in lists, not closed": b"[" * 1_000_000,
    "objects in objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "deeper than written": b"[" * 102 + b"]" * 102,
    "4,300 digits": b'{"fence": ' + b"7" * 4300 + b"}",
    "more than 64 bits": b"[123456789012345678901]",
    "a name twice": b'{"fence": 1, "fence": 2}',
    "a name a million times": b"{" + b'"a":1,' * 1_000_000 + b'"a":1}',
    "half a surrogate pair": rb'["\ud800"]',
    "not UTF-8": b'["\xff"]',
    "millions of lists": b"[" + b"[]," * 5_000_000 + b"1]",
    "millions of names": b"{" + b",".join(b'"%06d":1' % number for number in range(900_000)) + b"}",
    "one long text": b'["' + "\N{MUSICAL SYMBOL G CLEF}".encode() * 4_200_000 + b'"]',
    "nothing": b"",
    "zeros": bytes(1_000_000),
}


def test_read_json_of_hostile_files_raises_one_line_within_limits(tmp_path):
    paths = [tmp_path / name for name in HOSTILE]
    for path in paths:
        path.write_bytes(HOSTILE[path.name])
    for outcome in read_with_limits("ml_factory.storage.files:files.read_json", paths):
        outcome.check_refused("FileError")


def test_read_json_of_largest_file_stays_within_limits(tmp_path):
    texts = {
        "lists": b"[" + b"[]," * 990_000 + b"1]",
        "names": b"{" + b",".join(b'"%06d":1' % number for number in range(500_000)) + b"}",
        "texts": b"[" + b",".join(b'"%06d"' % number for number in range(1_500_000)) + b"]",
        "letters": b'["' + "\N{MUSICAL SYMBOL G CLEF}".encode() * 4_190_000 + b'"]',
    }
    paths = [tmp_path / name for name in texts]
    for path in paths:
        path.write_bytes(texts[path.name])
    for outcome in read_with_limits("ml_factory.storage.files:files.read_json", paths):
        assert not outcome.error, outcome
        outcome.check_costs()


def test_parse_json_returns_what_strict_writers_write():
    value = {"a": [1, -1.5, 1e300, True, None, "ü\N{GRINNING FACE}"], "b": {"c": [(1 << 63) - 1, -(1 << 63)]}, "": []}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2)):
        assert parse_json(text) == parse_json(text.encode()) == value
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]  # a mark that editors on Windows write
    assert parse_json("[" * 100 + "]" * 100) and parse_json("[NaN, 1e999]", finite=False)[1] == float("inf")


def test_parse_json_limits_are_those_of_the_caller():
    with pytest.raises(ValueError, match="nested deeper than 3"):
        parse_json("[[[[]]]]", deepest=3)
    with pytest.raises(ValueError, match="5 bytes, more than 4"):
        parse_json("[1,2]", largest=4)
    assert len(parse_json("[" + '"",' * 2_500_000 + "1]", largest=None)) == 2_500_001
    deep: dict = {}
    inner = deep
    for _ in range(100_000):
        inner["a"] = inner = {}
    with pytest.raises(ValueError, match="nested deeper than 100"):
        check_nesting(deep)


def test_json_of_files_is_read_by_parse_json_alone():
    """`json.loads` stays where a process reads what this library has just written to it, through a pipe."""
    pipes = {
        "storage/worker_process.py", "tracking/wandb_restore.py", "tracking/wandb_sync.py",
    }  # fmt: skip
    package = _ROOT / "ml_factory"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))
    }
    assert found == pipes
