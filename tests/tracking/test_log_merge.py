"""Merged log segments: few files, each record once, under kills and concurrent readers."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from ml_factory.errors import WorkspaceError
from ml_factory.storage.files import Files, files
from ml_factory.tracking import log_merge, run_log, wandb_process
from ml_factory.tracking.log_merge import merge_log_segments
from ml_factory.tracking.run_log import (
    RunLogAttempt,
    format_log_line,
    list_log_files,
    log_segment_name,
    read_log_segments,
    read_log_steps,
)
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_sync import WandbSync

ONE, TWO = RunLogAttempt(1, "a" * 8), RunLogAttempt(2, "b" * 8)


@pytest.fixture(autouse=True)
def nothing_was_reported(monkeypatch):
    monkeypatch.setattr(wandb_process, "_warned", set())


def write(folder: Path, attempt: RunLogAttempt, count: int, first: int = 0) -> None:
    """A segment for each of so many steps, the last line of each torn."""
    folder.mkdir(exist_ok=True)
    for number in range(first, first + count):
        line = format_log_line(number, 1.0, {"loss": number, "attempt": attempt.number})
        (folder / log_segment_name(attempt, number)).write_text(line + '{"step": 99')


def steps(*folders: Path) -> list[int]:
    rows = read_log_steps(*folders)
    assert all(row["metrics"]["loss"] == row["step"] for row in rows)
    return [row["step"] for row in rows]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("segment-*"))


def test_tracker_of_many_checkpoints_leaves_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(log_merge, "FAN_IN", 4)
    with Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off") as tracker:
        for step in range(100):
            tracker.log(step, {"loss": step})
            tracker.close_segment()
        assert steps(tmp_path / "w") == steps(tmp_path / "l") == list(range(100))
        assert len(names(tmp_path / "w")) <= 10 >= len(names(tmp_path / "l"))
    with Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off") as tracker:
        tracker.log(100, {"loss": 100})
    assert steps(tmp_path / "w") == steps(tmp_path / "l") == list(range(101))
    assert len(names(tmp_path / "w")) == 2


@pytest.mark.parametrize("attempt", [ONE, TWO], ids=["of an ended attempt", "of the present attempt"])
def test_merge_killed_anywhere_loses_and_doubles_no_record(tmp_path, monkeypatch, attempt):
    monkeypatch.setattr(log_merge, "FAN_IN", 4)
    count = 2 * log_merge.FAN_IN + 3

    def merge(folder: Path) -> None:
        merge_log_segments(folder, TWO, count + 1)

    def killed_at(folder: Path, operation: int) -> bool:
        """Merge until the so manieth write or removal, before and after which the process may die."""
        done = [0]

        def dying(method):
            def call(self, *args, **named):
                done[0] += 1
                if done[0] == operation:
                    raise KeyboardInterrupt
                method(self, *args, **named)
                done[0] += 1
                if done[0] == operation:
                    raise KeyboardInterrupt

            return call

        with monkeypatch.context() as patch:
            for name in ("write", "remove"):
                patch.setattr(Files, name, dying(getattr(Files, name)))
            try:
                merge(folder)
            except KeyboardInterrupt:
                return True
        return False

    operation = 1
    while True:
        folder = tmp_path / f"killed-{operation}"
        write(folder, attempt, count)
        before = read_log_segments(folder)
        killed = killed_at(folder, operation)
        assert read_log_segments(folder) == before and steps(folder) == list(range(count))
        merge(folder)
        assert read_log_segments(folder) == before and len(names(folder)) == (1 if attempt == ONE else 5)
        if not killed:
            break
        operation += 1
    assert operation > 2 * 2 * log_merge.FAN_IN  # each segment's removal was one of the deaths


def test_merge_repeated_over_growing_log_keeps_every_record_and_open_segment(tmp_path):
    for number in range(300):
        write(tmp_path, TWO, 1, first=number)
        merge_log_segments(tmp_path, TWO, number)
        assert log_segment_name(TWO, number) in names(tmp_path)  # still open
    assert steps(tmp_path) == list(range(300)) and len(names(tmp_path)) < 40


def test_reader_with_listing_from_before_the_merge_sees_all(tmp_path, monkeypatch):
    write(tmp_path, ONE, 20)
    listed = list_log_files(tmp_path)
    merge_log_segments(tmp_path, TWO, 0)
    assert len(names(tmp_path)) == 1
    listings = [listed]
    now = run_log.list_log_files
    monkeypatch.setattr(run_log, "list_log_files", lambda folder: listings.pop() if listings else now(folder))
    assert steps(tmp_path) == list(range(20)) and not listings


def test_merge_keeps_segment_that_grew_meanwhile(tmp_path):
    write(tmp_path, ONE, 3)
    merged = tmp_path / "aside"
    write(merged, ONE, 3)
    merge_log_segments(merged, TWO, 0)
    longer = tmp_path / log_segment_name(ONE, 2)
    longer.write_text(longer.read_text()[: -len('{"step": 99')] + format_log_line(3, 1.0, {"loss": 3}))
    (merged / log_segment_name(ONE, 0, 2)).rename(tmp_path / log_segment_name(ONE, 0, 2))
    merge_log_segments(tmp_path, TWO, 0)
    assert steps(tmp_path) == [0, 1, 2, 3] and names(tmp_path) == [log_segment_name(ONE, 0, 2), longer.name]


def test_damaged_merged_file_is_reported_unless_its_segments_are_there(tmp_path):
    write(tmp_path, ONE, 3)
    whole = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    merge_log_segments(tmp_path, TWO, 0)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], b"{}\n" + content, b"", b"[" * 50_000):
        path.write_bytes(damaged)
        with pytest.raises(WorkspaceError, match="damaged"):
            steps(tmp_path)
    path.write_bytes(content * 2)
    assert steps(tmp_path) == [0, 1, 2]
    path.write_bytes(content[:-1])
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data)
    assert steps(tmp_path) == [0, 1, 2]
    with pytest.raises(WorkspaceError, match="damaged"):
        merge_log_segments(tmp_path, TWO, 0)
    assert steps(tmp_path) == [0, 1, 2]


def test_upload_copies_no_segment_that_a_merged_file_holds(tmp_path, monkeypatch):
    local, folder = tmp_path / "l", tmp_path / "w"
    write(local, ONE, 4)
    with Tracker("run", {}, folder, local, mirror="off") as tracker:
        merged = log_segment_name(ONE, 0, 3)
        assert names(folder)[0] == names(local)[0] == merged
        (local / merged).unlink()
        write(local, ONE, 4)  # as on another machine, which has not merged them
        written = []
        monkeypatch.setattr(files, "write", lambda path, data: written.append(path))
        tracker.close_segment()
        assert [path for path in written if path.parent == folder] == []


def test_wandb_mirror_reads_each_record_once_while_segments_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(log_merge, "FAN_IN", 2)
    tracker = Tracker("run", {}, tmp_path / "w", tmp_path / "l", mirror="off")
    spec = {"run_id": "run", "local": tmp_path / "l", "folder": tmp_path / "w", "attempt": tracker._attempt,
            "mode": "offline", "snapshot": None}  # fmt: skip
    sync, seen = WandbSync(SimpleNamespace(), spec, lambda **named: None), []
    for step in range(40):
        tracker.log(step, {"loss": step})
        if step % 3 == 0:
            seen += [record["step"] for record in sync._new_records()]
        if step % 2 == 0:
            tracker.close_segment()
        if step % 7 == 0:
            seen += [record["step"] for record in sync._new_records()]
    tracker.finish()
    seen += [record["step"] for record in sync._new_records()]
    assert seen == list(range(40)) and len(names(tmp_path / "l")) < 8
