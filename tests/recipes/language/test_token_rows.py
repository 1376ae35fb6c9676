"""Packed rows: the text end to end, the same after any kill, read back by position."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ml_factory.errors import FileError, SettingsError
from ml_factory.recipes.language import token_rows
from ml_factory.recipes.language.text_sources import HubData, TextFiles, open_text
from ml_factory.recipes.language.token_rows import pack_tokens
from ml_factory.recipes.language.tokenizers import ByteTokenizer

TEXTS = [f"document {number} " * (number % 7) for number in range(200)]


class Texts:
    """Documents in memory; remembers where it was asked to begin."""

    fingerprint = "texts"

    def __init__(self, path=None):
        self.starts = []

    def documents(self, start=0):
        self.starts.append(start)
        from ml_factory.recipes.language.text_sources import Document

        return iter([Document(text) for text in TEXTS][start:])


def flat(texts) -> np.ndarray:
    own = ByteTokenizer()
    return np.concatenate([np.append(one, 256) for one in own.encode(texts)])


def test_pack_tokens_is_text_end_to_end_with_ends_between(tmp_path):
    rows, index = pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path, part_rows=5)
    expected = flat(TEXTS)
    assert rows.dtype == np.int32 and index.parts > 3 and index.dropped == len(expected) % 32
    assert np.array_equal(rows.whole().ravel(), expected[: len(rows) * 32])
    assert np.array_equal(rows[np.array([11, 0, 7])], rows.whole()[[11, 0, 7]])
    assert np.array_equal(rows.between(4, 9).whole(), rows.whole()[4:9])


@pytest.mark.parametrize("fatal", [1, 2, 3, 6, 7])
def test_pack_tokens_killed_at_any_write_goes_on_at_the_token(fatal, tmp_path, monkeypatch):
    whole = pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path / "whole", part_rows=9)[0].whole()
    calls = []

    def dying(name, real):
        def call(*args):
            calls.append(name)
            if len(calls) == fatal:
                raise KeyboardInterrupt
            return real(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(token_rows, "write_array", dying("part", token_rows.write_array))
        patch.setattr(token_rows.files, "write_json", dying("index", token_rows.files.write_json))
        with pytest.raises(KeyboardInterrupt):
            pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path / "killed", part_rows=9)
    source = Texts()
    rows, _ = pack_tokens(source, ByteTokenizer(), 32, tmp_path / "killed", part_rows=9)
    assert np.array_equal(rows.whole(), whole)
    assert (source.starts[0] > 0) is (fatal > 2)  # not from the beginning once an index was written


def test_pack_tokens_finished_is_not_read_again_and_most_ends_it(tmp_path):
    pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path, part_rows=5, most=500)
    source = Texts()
    rows, index = pack_tokens(source, ByteTokenizer(), 32, tmp_path, part_rows=5, most=500)
    assert source.starts == [] and len(rows) == 500 // 32 and index.dropped == 0
    assert np.array_equal(rows.whole().ravel(), flat(TEXTS)[: len(rows) * 32])


def test_pack_tokens_of_short_text_or_damaged_index_names_next_step(tmp_path):
    with pytest.raises(SettingsError, match=r"shorter than one sequence.*max_seq_length"):
        pack_tokens(Texts(), ByteTokenizer(), 1 << 20, tmp_path / "short")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "index.json").write_text(json.dumps({"parts": -1}))
    with pytest.raises(FileError, match=r"damaged.*delete"):
        pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path / "bad")


@pytest.mark.parametrize("damage", ["cut off", "shorter", "other rows", "no header", "last shorter"])
def test_pack_tokens_with_damaged_part_is_refused_and_never_shorter(damage, tmp_path):
    _, index = pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path, part_rows=5)
    path = tmp_path / ("tokens-00001.npy" if damage != "last shorter" else f"tokens-{index.parts - 1:05d}.npy")
    data, rows = path.read_bytes(), np.load(path)
    if damage in ("shorter", "last shorter"):
        token_rows.write_array(path, rows[:-1])
    elif damage == "other rows":
        token_rows.write_array(path, rows.reshape(10, -1))
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut off" else data[:10] + b"('" * 60 + data[130:])
    with pytest.raises(FileError, match=r"damaged.*made again"):
        pack_tokens(Texts(), ByteTokenizer(), 32, tmp_path, part_rows=5)[0].whole()


def test_open_text_reads_plain_parquet_and_lines_alike(tmp_path):
    pq.write_table(pa.table({"text": TEXTS, "other": range(200)}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS))
    of_parquet, of_lines = (open_text(str(tmp_path / f"a.{kind}")) for kind in ("parquet", "jsonl"))
    assert [one.text for one in of_parquet.documents()] == TEXTS == [one.text for one in of_lines.documents()]
    assert [one.text for one in of_parquet.documents(150)] == TEXTS[150:]
    assert of_parquet.fingerprint != of_lines.fingerprint
    with pytest.raises(SettingsError, match=r"no such text column.*text, other"):
        list(open_text(str(tmp_path / "a.parquet"), column="body").documents())
    folder = open_text(str(tmp_path))
    assert len(list(folder.documents())) == 400


def test_plain_text_is_one_document_in_pieces_cut_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("ml_factory.recipes.language.text_sources._PIECE", 50)
    text = "".join(f"line {number}\n" for number in range(40)) + "no end"
    (tmp_path / "a.txt").write_text(text)
    found = list(TextFiles([tmp_path / "a.txt"]).documents())
    assert "".join(one.text for one in found) == text and len(found) > 5
    assert [one.ends for one in found] == [False] * (len(found) - 1) + [True]
    assert all(one.text.endswith("\n") for one in found[:-1])


def test_open_text_of_unknown_name_is_a_stream_of_the_hub(monkeypatch, tmp_path):
    asked = []

    class Rows(list):
        def skip(self, count):
            return self[count:]

    def load(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        return Rows({"text": one} for one in TEXTS)

    monkeypatch.setattr("ml_factory.recipes.language.text_sources.datasets", type("M", (), {"load_dataset": load}))
    source = open_text("wikitext", "wikitext-2-raw-v1")
    assert isinstance(source, HubData) and [one.text for one in source.documents(198)] == TEXTS[198:]
    assert asked == [("wikitext", "wikitext-2-raw-v1", "train", True)]
    with pytest.raises(SettingsError, match="no such file"):
        open_text(str(tmp_path / "none.txt"))
