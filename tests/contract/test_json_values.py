"""JSON that anyone may have written: strict, and one line where it is refused."""

import hashlib
import json

import numpy as np
import pytest

from ml_factory.errors import FileError
from tests.contract.doors import files, fingerprint_json, parse_json, to_json_value

HOSTILE = {
    "NaN": b'{"a": NaN}',
    "an infinity": b"[-Infinity]",
    "a number that is infinite": b"[1e999]",
    "lists in lists": b"[" * 10_000 + b"]" * 10_000,
    "5,000 digits": b'{"fence": ' + b"7" * 5000 + b"}",
    "400 digits, more than a float holds": b'{"time": ' + b"7" * 400 + b"}",
    "not UTF-8": b'["\xff"]',
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_read_json_of_hostile_file_raises_one_line(tmp_path, name):
    (tmp_path / "a.json").write_bytes(HOSTILE[name])
    with pytest.raises(FileError) as refused:
        files.read_json(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(refused.value)
    assert "\n" not in str(refused.value).strip() and len(str(refused.value)) < 500


def test_parse_json_returns_what_strict_writers_write():
    value = {"a": [1, -1.5, 1e300, True, None, "ü\N{GRINNING FACE}"], "b": {"c": [(1 << 63) - 1, -(1 << 63)]}, "": []}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), json.dumps(value, indent=2)):
        assert parse_json(text) == parse_json(text.encode()) == value
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]  # a mark that editors on Windows write
    assert parse_json("[NaN, 1e999]", finite=False)[1] == float("inf")


def test_written_json_is_redacted_strict_and_read_again(tmp_path):
    file = tmp_path / "a.json"
    files.write_json(file, {"b": [1, 2.5, None], "ä": "ü"})
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(file, {"x": float("nan")})
    assert files.read_json(file) == {"b": [1, 2.5, None], "ä": "ü"}
    file.write_text('{"a": 1,\n "b" 2}')
    for path, words in ((file, "line 2"), (tmp_path / "absent.json", "No such file")):
        with pytest.raises(FileError, match=words):
            files.read_json(path)


def test_values_become_strict_json_and_its_fingerprint_depends_on_content_alone(tmp_path):
    got = to_json_value({"a": np.float32(0.5), 3: (np.int64(7), float("inf")), "p": tmp_path, "n": np.bool_(True)})
    assert json.dumps(got, allow_nan=False) == f'{{"a": 0.5, "3": [7, null], "p": "{tmp_path}", "n": true}}'
    with pytest.raises(TypeError, match="ndarray"):
        to_json_value({"a": np.zeros(3)})
    assert fingerprint_json({"a": 1, "b": [2, 3]}) == fingerprint_json({"b": [2, 3], "a": 1})
    assert fingerprint_json({}) == hashlib.sha256(b"{}").hexdigest()
    different = [{"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": True}, {"a": None}, {"b": 1}, [1], {"a": [1]}]
    assert len({fingerprint_json(obj) for obj in different}) == len(different)
