"""Text read as documents and packed end to end into rows, the same after a kill, read back by position."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ml_factory.errors import FileError, SettingsError
from tests.contract.doors import TextSource, byte_tokenizer, open_text, pack_tokens, text_module

TEXTS = [f"document {number} " * (number % 7) for number in range(200)]
BYTES = byte_tokenizer()
TOKEN_OF = {byte: int(BYTES.encode([chr(byte)])[0][0]) for byte in range(32, 127)}


def pieces_of_texts():
    yield from ((one, True) for one in TEXTS)


SOURCE = TextSource("texts", pieces_of_texts)


def flat() -> np.ndarray:
    """Tokens of the texts, byte by byte, each text followed by the end."""
    return np.array([token for one in TEXTS for token in (*(TOKEN_OF[byte] for byte in one.encode()), BYTES.end)])


@pytest.mark.parametrize("at_once", [1, 64])
def test_pack_tokens_is_text_end_to_end_with_ends_between(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "AT_ONCE", at_once)
    rows = pack_tokens(SOURCE, BYTES, 32, tmp_path)
    expected = flat()
    assert rows.dtype == np.int32 and rows.shape == (len(expected) // 32, 32)
    assert np.array_equal(rows.ravel(), expected[: rows.size])


def test_pack_tokens_killed_begins_anew_and_finished_is_not_read_again(tmp_path):
    def dying():
        yield "a" * 100, True
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_tokens(TextSource("texts", dying), BYTES, 32, tmp_path)
    rows = pack_tokens(SOURCE, BYTES, 32, tmp_path, most=500)
    assert np.array_equal(rows.ravel(), flat()[: 500 // 32 * 32])
    again = pack_tokens(replace(SOURCE, pieces=dying), BYTES, 32, tmp_path, most=500)
    assert np.array_equal(again, rows)


def test_pack_tokens_of_short_text_names_next_step(tmp_path):
    with pytest.raises(SettingsError, match=r"shorter than one sequence.*max_seq_length"):
        pack_tokens(SOURCE, BYTES, 1 << 20, tmp_path)
    assert not (tmp_path / "tokens.npy").exists()


@pytest.mark.parametrize("size", [40, 200, -4])
def test_pack_tokens_with_damaged_rows_is_refused_and_never_shorter(size, tmp_path):
    pack_tokens(SOURCE, BYTES, 32, tmp_path)
    path = tmp_path / "tokens.npy"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(FileError, match=r"damaged.*made again"):
        pack_tokens(SOURCE, BYTES, 32, tmp_path)


def test_pack_tokens_writes_rows_while_it_reads(tmp_path):
    seen = []

    def pieces():
        for _ in range(50):
            seen.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            yield from pieces_of_texts()

    rows = pack_tokens(TextSource("texts", pieces), BYTES, 32, tmp_path)
    assert np.array_equal(rows.ravel(), np.tile(flat(), 50)[: rows.size]) and seen[-1] > rows.nbytes / 2


WRITERS = {  # kind -> function that writes texts, one a row, into a file
    "txt": lambda path, texts: path.write_text("".join(texts)),
    "jsonl": lambda path, texts: path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts)),
    "parquet": lambda path, texts: pq.write_table(pa.table({"text": texts, "other": range(len(texts))}), path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_open_text_reads_the_named_file_alone_row_by_row(kind, tmp_path):
    path = tmp_path / f"a[1]*.{kind}"
    WRITERS[kind](path, TEXTS)
    WRITERS[kind](tmp_path / f"a1x.{kind}", ["another's"])
    source = open_text(str(path))
    found, whole = list(source.pieces()), [("".join(TEXTS), False), ("", True)]
    assert found == (whole if kind == "txt" else list(pieces_of_texts()))
    assert len({source.fingerprint, open_text(str(tmp_path)).fingerprint}) == 2


def test_plain_text_is_one_document(tmp_path):
    text = "".join(f"line {number}\r\n" for number in range(40)) + "no end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    found = list(open_text(str(tmp_path / "a.txt")).pieces())
    assert "".join(part for part, _ in found) == text.replace("\r", "")
    assert [ends for _, ends in found].index(True) == len(found) - 1


def test_open_text_of_unknown_name_is_a_stream_of_the_hub(monkeypatch):
    asked = []

    def load(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        return [{"text": one} for one in TEXTS]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert list(open_text("wikitext", "wikitext-2-raw-v1").pieces()) == list(pieces_of_texts())
    assert asked == [("wikitext", "wikitext-2-raw-v1", "train", True)]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *given, **more: []))
    with pytest.raises(SettingsError, match=r"cannot be read.*no rows"):
        list(open_text("wikitext").pieces())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", None, r"cannot be read.*a\.parquet.*the column body"),
        ("a.jsonl", '{"body": "fine"}\n{"body"\n', r"cannot be read.*a\.jsonl"),
        ("a.jsonl", "", r"cannot be read.*a\.jsonl"), ("none.txt", None, "no such text"),
    ],
)  # fmt: skip
def test_text_without_rows_or_the_column_or_damaged_is_refused_by_its_name(name, content, message, tmp_path):
    WRITERS["parquet"](tmp_path / "a.parquet", TEXTS)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SettingsError, match=message):
        list(open_text(str(tmp_path / name), column="body").pieces())
