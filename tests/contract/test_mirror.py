"""The working copy of a workspace on a mount or in a bucket: two machines, deaths in between, damage on the way.

The bucket is a real server of the GCS protocol. What does not depend on the remote is tested on the mount, the quicker.
"""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from ml_factory import CheckpointManager
from ml_factory.errors import SettingsError, WorkspaceError
from tests.contract.doors import LEDGER, REMOVALS, Bucket, Mirror, acquire_lock_file, files, mirror, release_lock_file


def write(mirror: Mirror, name: str, data: bytes) -> None:
    path = mirror.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """(the mounted folder, the mirrors of two machines)"""
    monkeypatch.setattr(mirror, "LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))
    place = tmp_path / "drive/ws"
    return place, Mirror(str(place), tmp_path / "one"), Mirror(str(place), tmp_path / "two")


@pytest.fixture
def machines(drive):
    return drive[1:]


def in_bucket(address: str, folder: Path) -> Mirror:
    """A mirror whose bucket is read by this process: a child would import the client first."""
    mirror = Mirror(address, folder)
    mirror.remote = Bucket(address)
    mirror.remote.is_mount = False
    return mirror


@pytest.fixture
def bucket(gcs_bucket, tmp_path):
    return in_bucket(gcs_bucket, tmp_path / "one"), in_bucket(gcs_bucket, tmp_path / "two")


def refuse(*_):
    raise WorkspaceError("no right to write")


# ---------------------------------------------------------------- what each remote does


def test_pushed_files_are_pulled_once_by_other_machine(bucket):
    one, two = bucket
    write(one, "models/MES/a/state.safetensors", bytes(range(256)) * 3_000)
    write(one, "models/MES/a/artifact.json", b'{"hash": "x"}')
    write(one, "raw/MES_1m.parquet", b"bars")
    names = ["models/MES/a/state.safetensors", "raw/MES_1m.parquet", "models/MES/a/artifact.json"]
    assert one.push() == names  # the small file that refers to others comes last
    assert two.pull() == names
    for name in names:
        assert (two.folder / name).read_bytes() == (one.folder / name).read_bytes()
    two.remote.get_head(names[0], two.folder.with_name("head"), 300)  # of a checkpoint
    assert two.folder.with_name("head").read_bytes() == bytes(range(256)) + bytes(range(44))
    again = two.pull(), two.push(), one.push(), one.pull()
    assert not any(again) and all((one.folder / name).exists() and (two.folder / name).exists() for name in names)
    write(two, names[2], b"changed")
    assert two.push() == names[2:] and one.pull() == names[2:]
    assert not list(one.folder.rglob("*.kept"))
    write(one, names[2], b"theirs")
    one.push()
    write(two, names[2], b"mine, not pushed yet")
    assert two.pull() == [] and (two.folder / names[2]).read_bytes() == b"mine, not pushed yet"


def test_bucket_loses_what_was_removed_and_keeps_what_is_only_missing(bucket):
    one, two = bucket
    for name in ("a.npy", "old/b.npy", "old/c.json"):
        write(one, f"results/{name}", name.encode())
    one.push()
    shutil.rmtree(one.folder / "results")
    one.push()
    assert len(two.pull()) == 3
    assert one.pull() == ["results/a.npy", "results/old/b.npy", "results/old/c.json"]
    files.remove_folder(one.folder / "results/old")
    one.push()
    two.pull()
    assert not list((two.folder / "results/old").iterdir()) and (two.folder / "results/a.npy").exists()
    write(one, "results/old/b.npy", b"again")
    one.push()
    (one.folder / "results/old/b.npy").unlink()  # removed long ago, and now only missing
    one.push()
    assert two.pull() == ["results/old/b.npy"]
    absent = in_bucket("gs://absent/mine", one.folder.with_name("three"))
    write(absent, "a.npy", b"1")
    for step, where in ((absent.push, r"gs://absent/mine/a\.npy"), (absent.pull, "gs://absent/mine")):
        with pytest.raises(WorkspaceError, match=rf"refused or did not answer \[{where}\]"):
            step()


def test_drive_keeps_what_is_missing_here_and_checkpoints_are_overwritten_in_place(drive, tmp_path):
    place, one, two = drive
    with CheckpointManager(tmp_path / "local", run="r") as manager:
        for state in ({"first": "longer"}, {"second": 2}):
            manager.save_checkpoint("p", state, force=True)
    for content in (path.read_bytes() for path in sorted((tmp_path / "local").glob("r/p.*.ckpt"))):
        write(one, "checkpoints/r/p.0.ckpt", content)
        write(one, "models/MES/a/artifact.json", content)
        one.push()
        inode = (place / "checkpoints/r/p.0.ckpt").stat().st_ino
        two.pull()
        for name in ("checkpoints/r/p.0.ckpt", "models/MES/a/artifact.json"):
            assert (two.folder / name).read_bytes() == (place / name).read_bytes() == content
    assert (place / "checkpoints/r/p.0.ckpt").stat().st_ino == inode
    files.remove(one.folder / "models/MES/a/artifact.json")
    (one.folder / "checkpoints/r/p.0.ckpt").unlink()  # only missing: it stays there
    one.push()
    assert not (place / "models/MES/a/artifact.json").exists() and (place / "checkpoints/r/p.0.ckpt").exists()


def test_drive_gets_dropped_file_again_and_rm_of_checkpoints_is_followed(drive, monkeypatch):
    place, one, _ = drive
    names = ("checkpoints/r/p.0.npy", "checkpoints/r/p.1.npy", "checkpoints/s/p.0.npy", "models/MES/a.txt")
    for name in names:
        write(one, name, name.encode())
    one.push()
    (place / names[0]).unlink()
    (place / names[3]).unlink()
    one.pull()
    assert one.push() == [names[0], names[3]]
    away = place.parent / "away"
    shutil.move(place / "checkpoints/r", away)  # the guide's rm -rf, or a drive that lists it late
    with monkeypatch.context() as patch:
        patch.setattr(mirror.time, "sleep", lambda _: shutil.move(away, place / "checkpoints/r"))
        one.pull()
        assert (one.folder / names[1]).exists() and (place / names[1]).exists()
    one.push()
    shutil.rmtree(place / "checkpoints/r")
    acquire_lock_file(lock := one.folder / "checkpoints/locks/r--p.lock", "a training")
    one.pull()
    assert set(one.push()) == set(names[:2])
    release_lock_file(lock)
    shutil.rmtree(place / "checkpoints/r")
    one.pull()
    assert [(one.folder / name).exists() for name in names[:3]] == [False, False, True] and one.push() == []
    assert (one.folder / f"{names[0]}.gone").read_bytes() == names[0].encode()  # until the next session
    Mirror(one.address, one.folder)
    assert not list(one.folder.rglob("*.gone"))
    shutil.rmtree(place)  # a drive that lists nothing at all is not believed
    place.mkdir()
    one.pull()
    assert set(one.push()) == set(names[2:])


def test_names_outside_workspace_are_skipped(machines, tmp_path, monkeypatch):
    """GCS allows any name."""
    one, two = machines
    write(one, "kept.npy", b"1")
    one.push()
    found = two.remote.list_files("")
    names = ("../outside", "a/../../outside", "/etc/x", "results/.hidden", "a\\..\\..\\outside", "C:outside",
             "a/b\0c", "a//b", "./a", "a/..")  # fmt: skip
    evil = dict.fromkeys(names, found["kept.npy"])
    monkeypatch.setattr(two.remote, "list_files", lambda folder: evil | found, raising=False)
    assert two.pull() == ["kept.npy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drive", "one", "two"]


@pytest.mark.parametrize("url", ["gs://", "s3://bucket/x", "gs:///x", "gs://bucket/../x"])
def test_invalid_address_of_a_bucket_raises(url, tmp_path):
    with pytest.raises(SettingsError, match="not the address of a bucket"):
        Mirror(url, tmp_path)


# ---------------------------------------------------------------- passes over any remote


def test_push_and_pull_move_given_prefix_only_and_no_locks_or_temporary_files(machines):
    one, two = machines
    for symbol in ("MES", "MGC"):
        write(one, f"data/processed/{symbol}/part.npy", symbol.encode())
    one.push("data/processed/MES/")
    assert two.pull() == ["data/processed/MES/part.npy"]
    one.push()
    assert two.pull("data/processed/MES/") == []
    assert two.pull("data/processed/MGC/") == ["data/processed/MGC/part.npy"]
    for name in ("models/MES/.registry.lock", "checkpoints/r/p/owner.lock", "raw/.MES.parquet.12-3.tmp"):
        write(one, name, b"x")
    assert one.push() == []


def test_pull_keeps_a_local_file_that_was_never_pushed(machines, caplog):
    one, two = machines
    write(one, "results/a.json", b"theirs")
    write(one, "results/same.json", b"same")
    one.push()
    write(two, "results/a.json", b"mine")
    write(two, "results/same.json", b"same")
    two.pull()
    assert (two.folder / "results/a.json").read_bytes() == b"theirs"
    assert (two.folder / "results/a.json.kept").read_bytes() == b"mine" and "a.json.kept" in caplog.text
    assert not (two.folder / "results/same.json.kept").exists() and two.push() == []


def test_killed_push_or_pull_leaves_no_manifest_with_missing_parts_and_moves_no_part_twice(machines, monkeypatch):
    one, two = machines
    for part in range(3):
        write(one, f"set/part-{part}.npy", bytes(1000 + part))
    write(one, "set/manifest.json", json.dumps([f"set/part-{part}.npy" for part in range(3)]).encode())
    for deaths in (0, 1, 2, 0):
        sent = []

        def send(name, path, original=one.remote.put, sent=sent, deaths=deaths):
            if len(sent) == deaths:
                raise WorkspaceError("the machine is gone")
            sent.append(name)
            return original(name, path)

        with monkeypatch.context() as patch:
            patch.setattr(one.remote, "put", send, raising=False)
            with pytest.raises(WorkspaceError, match="gone"):
                one.push()
        two.pull()
        assert not (two.folder / "set/manifest.json").exists()
    assert one.push() == ["set/manifest.json"]  # each part was compared there when it was sent
    two.pull()
    assert (two.folder / "set/part-2.npy").read_bytes() == bytes(1002)
    three = Mirror(one.address, one.folder.with_name("three"))
    three.fetch("set/part-0.npy")
    get = three.remote.get
    with monkeypatch.context() as patch:
        patch.setattr(three.remote, "get", lambda *one: refuse() if "json" in one[0] else get(*one), raising=False)
        with pytest.raises(WorkspaceError, match="no right"):
            three.pull()
    assert not three.has_synchronized()  # an empty machine does not work with a part
    assert three.pull() == ["set/manifest.json"] and three.has_synchronized()


def test_pull_of_file_changed_in_transfer_gets_newest_content(machines, monkeypatch):
    """One machine writes while another pulls."""
    one, two = machines
    beats = iter(range(2))

    def beat():
        if next(beats, None) is not None:
            write(one, "results/a.json", (one.folder / "results/a.json").read_bytes() + b".")
            one.push()

    write(one, "results/a.json", b"beat")
    one.push()
    get = two.remote.get
    monkeypatch.setattr(two.remote, "get", lambda *given: (beat(), get(*given)), raising=False)
    assert two.pull() == ["results/a.json"]
    assert (two.folder / "results/a.json").read_bytes() == b"beat.."
    assert two.pull() == []


def test_pull_does_not_write_through_symbolic_link(machines, tmp_path):
    one, two = machines
    write(one, "results/a.npy", b"1")
    one.push()
    (tmp_path / "outside").mkdir()
    (two.folder / "results").symlink_to(tmp_path / "outside")
    with pytest.raises(WorkspaceError, match="symbolic link"):
        two.pull()
    assert os.listdir(tmp_path / "outside") == []


@pytest.mark.parametrize("text", ["[]", '{"a.txt": 5, "../x": {"version": 1, "local": 2}}', "{"])
def test_damaged_ledger_or_note_of_a_removal_lets_all_files_be_compared_again(machines, text):
    one, two = machines
    write(one, "models/a.txt", b"a")
    one.push()
    (two.folder / LEDGER).write_text(text)
    assert two.pull() == ["models/a.txt"] and (two.folder / "models/a.txt").read_bytes() == b"a"
    (one.folder / REMOVALS).write_text('["models/a.t')  # torn by a kill
    write(one, "models/b.txt", b"b")
    assert one.push() == ["models/b.txt"] and two.pull() == ["models/b.txt"]


def test_push_skips_slot_overwritten_in_transfer(machines, monkeypatch):
    one, two = machines
    for name in ("a", "b", "c"):
        write(one, f"checkpoints/slot-{name}.npy", name.encode())
    send = one.remote.put

    def overwritten(name, path):
        if name.endswith("b.npy"):
            write(one, name, b"longer than before")
            refuse()
        return send(name, path)

    with monkeypatch.context() as patch:
        patch.setattr(one.remote, "put", overwritten, raising=False)
        assert one.push() == ["checkpoints/slot-a.npy", "checkpoints/slot-c.npy"]
    assert one.push() == ["checkpoints/slot-b.npy"]
    two.pull()
    assert (two.folder / "checkpoints/slot-b.npy").read_bytes() == b"longer than before"


# ---------------------------------------------------------------- pushes in the background


@pytest.fixture
def slow(machines, monkeypatch):
    """(the mirrors, set when the upload of a checkpoint has begun, lets it go on)"""
    began, may_go_on, send = threading.Event(), threading.Event(), machines[0].remote.put

    def wait(name, path):
        if name.startswith("checkpoints/"):
            began.set()
            assert may_go_on.wait(30)
        return send(name, path)

    monkeypatch.setattr(machines[0].remote, "put", wait, raising=False)
    return machines, began, may_go_on


def test_background_push_includes_files_added_meanwhile_and_a_refusal_is_one_warning(slow, monkeypatch, caplog):
    (one, two), began, may_go_on = slow
    write(one, "checkpoints/slot-1.npy", b"first")
    one.push_in_background("checkpoints/")
    assert began.wait(30)
    write(one, "checkpoints/slot-2.npy", b"second")
    write(one, "models/a", b"other")
    for place in ("checkpoints/", "models/", "checkpoints/"):  # returns at once
        one.push_in_background(place)
    may_go_on.set()
    assert one.wait(30)
    assert two.pull() == ["checkpoints/slot-1.npy", "checkpoints/slot-2.npy", "models/a"]
    done = []
    monkeypatch.setattr(one.remote, "put", refuse, raising=False)
    write(one, "checkpoints/slot-3.npy", b"third")
    for _ in range(2):
        one.push_in_background("checkpoints/", done=lambda: done.append(1))
        assert not one.wait(30)
    assert caplog.text.count("the run continues") == 1 and done == []


def test_two_mirrors_of_one_folder_make_one_pass_at_a_time(slow):
    (one, _), began, may_go_on = slow
    other, results = Mirror(one.address, one.folder), []
    write(one, "checkpoints/slot-1.npy", b"large")
    one.push_in_background("checkpoints/")
    assert began.wait(30)
    thread = threading.Thread(target=lambda: results.append(other.push()))
    thread.start()
    thread.join(0.5)
    may_go_on.set()
    thread.join()
    assert results == [[]] and one.wait(30)


def test_lease_is_pushed_and_pulled_while_large_push_is_under_way(slow):
    (one, two), began, may_go_on = slow
    write(one, "checkpoints/slot-1.npy", b"large")
    one.push_in_background("checkpoints/")
    assert began.wait(30)
    mine, theirs = (Mirror(f"{m.address}/checkpoints/leases", m.folder / "checkpoints/leases") for m in (one, two))
    write(mine, "unit.json", b"{}")
    mine.push_in_background()
    assert mine.wait(30) and theirs.pull() == ["unit.json"]
    may_go_on.set()
    assert one.wait(30) and two.pull() == ["checkpoints/slot-1.npy"]
    assert one.push() == []


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n", b"\0"])
def test_file_that_ends_like_a_line_comes_back_whole_from_a_bucket(gcs_bucket, tmp_path, end):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "f.bin").write_bytes(b"\n--x" + end)
    Mirror(gcs_bucket, tmp_path / "here").push()
    Mirror(gcs_bucket, tmp_path / "there").pull()
    assert (tmp_path / "there" / "f.bin").read_bytes() == b"\n--x" + end


def test_transfer_to_and_from_a_bucket_gives_signs_of_life(gcs_bucket, tmp_path):
    signs, file = [], tmp_path / "large"
    file.write_bytes(bytes(500_000))
    bucket = Bucket(gcs_bucket, lambda: signs.append(file))
    bucket.put("large", file)
    uploaded = len(signs)
    bucket.get("large", tmp_path / "copy", bucket.facts("large"))
    assert 0 < uploaded < len(signs)
