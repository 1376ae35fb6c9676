"""Tab-separated labelled texts: what is read, what is refused with its line, and the split by blocks."""

import pytest

from ml_factory.errors import FactoryError
from tests.contract import doors


def written(tmp_path, content: str | bytes) -> str:
    path = tmp_path / "rows.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_read_labelled_texts_takes_columns_by_name_and_keeps_quotes(tmp_path):
    rows = doors.read_labelled_texts(
        written(tmp_path, b'\xef\xbb\xbflabel\tID\tmore\tText\r\nINFORMATIVE\t7\tx\t"A "b" c\r\n\r\n')
    )
    assert rows.to_numpy().tolist() == [["7", '"A "b" c', "INFORMATIVE"]]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("Id\tText\n1\ta", "line 1", "wanted Label once"),
        ("", "line 1", "wanted Id once"),
        ("Id\tText\tLabel\n1\ta\tb\n2\tc\td\te", "line 3", "wanted 3 fields"),
        ("Id\tText\tLabel\n1\ta\tb\n2\tc", "line 3", "wanted 3 fields"),
        ("Id\tText\tLabel\n\n1\ta\t ", "line 3", "no empty Id, Text or Label"),
        ("Id\tText\tLabel\n1\ta\tb\n1\tc\td", "line 3", "each Id once"),
        (b"Id\tText\tLabel\n1\ta\xff\tb", "line 2", "no UTF-8"),
    ],
)
def test_wrong_line_is_refused_with_its_number(content, line, message, tmp_path):
    with pytest.raises(FactoryError) as caught:
        doors.read_labelled_texts(written(tmp_path, content))
    assert line in str(caught.value) and message in str(caught.value)


def test_file_without_rows_is_refused(tmp_path):
    with pytest.raises(FactoryError, match="no rows"):
        doors.read_labelled_texts(written(tmp_path, "Id\tText\tLabel\n"))


def test_split_by_blocks_takes_contiguous_rows_of_every_label():
    rows = doors.made_up_texts(200, 0)
    parts = doors.split_by_blocks(rows, 0.1, 0.2)
    assert [len(part) for part in parts.values()] == [140, 20, 40]
    for label in set(rows["Label"]):
        ids = [part.loc[part["Label"] == label, "Id"].astype(int) for part in parts.values()]
        assert max(ids[0]) < min(ids[1]) and max(ids[1]) < min(ids[2])
    with pytest.raises(FactoryError, match="too few rows"):
        doors.split_by_blocks(rows.iloc[:4], 0.1, 0.1)


def test_overview_counts_labels_lengths_and_texts_seen_in_training():
    rows = doors.made_up_texts(8, 0)
    test = rows.iloc[:2].assign(Text=[rows["Text"][0].upper() + "  ", "another text"])
    parts = {"train": rows, "validation": rows.iloc[2:4], "test": test}
    found = doors.overview(parts)
    assert found["train"]["labels"] == {"harbour": 4, "kitchen": 4}
    assert found["test"]["seen_in_training"] == 1 and doors.unseen_rows(parts, "test").tolist() == [False, True]
    assert ["seen in training" in line for line in doors.describe(found).splitlines()] == [False, True, True]
    assert "seen_in_training" not in found["train"]
    assert found["train"]["median_characters"] == rows["Text"].str.len().median()
    with pytest.raises(FactoryError, match="A label that no training row has"):
        doors.check_parts(parts | {"test": test.assign(Label=["harbour", "cellar"])})
