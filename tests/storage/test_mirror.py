"""A mirror whose remote answers wrongly, lists, or is called while it works: what its public doors cannot show."""
# ruff: noqa: F811 - fixtures of the contract

import time
from pathlib import Path

import pytest

from ml_factory.errors import WorkspaceError
from ml_factory.storage.remote import MountedFolder
from tests.contract.test_mirror import bucket, drive, machines, refuse, slow, write  # noqa: F401 - fixtures
from tests.storage.gcs import gcs_bucket  # noqa: F401 - a fixture


@pytest.mark.parametrize("remote", ["drive", "bucket"])
def test_damaged_copy_is_refused_and_the_file_before_stays(remote, request, monkeypatch):
    one, two = request.getfixturevalue(remote)[-2:]
    write(one, "checkpoints/r/p.0.npy", b"good" * 100)
    one.push()
    with monkeypatch.context() as patch:
        if remote == "drive":
            patch.setattr(one, "remote", MountedFolder(one.address))
            patch.setattr(one.remote, "_write", lambda source, place, flags: place.write_bytes(b"new!" * 50))
            write(one, "checkpoints/r/p.0.npy", b"new!" * 100)
            with pytest.raises(WorkspaceError, match="not what the workspace holds"):
                one.push()
        else:
            patch.setattr(
                two.remote._files, "get_file", lambda key, target, **_: Path(target).write_bytes(b"good" * 50)
            )
            with pytest.raises(WorkspaceError, match="not what the workspace holds"):
                two.pull()
            assert not (two.folder / "checkpoints/r/p.0.npy").exists()
    assert one.push() == (["checkpoints/r/p.0.npy"] if remote == "drive" else [])
    assert two.pull() == ["checkpoints/r/p.0.npy"]


def test_background_request_that_arrives_while_its_list_is_taken_is_pushed_and_acknowledged(slow):
    (one, two), began, may_go_on = slow
    done = []

    class Requests(dict):
        def setdefault(self, places, empty):
            found = super().setdefault(places, empty)
            if found:  # the request before it may be taken now
                may_go_on.set()
                time.sleep(0.5)
            return found

    one._requests = Requests()
    write(one, "checkpoints/slot-1.npy", b"large")
    one.push_in_background("checkpoints/")
    assert began.wait(30)
    for name in ("a", "b"):
        write(one, f"models/{name}", b"1")
        one.push_in_background("models/", done=lambda name=name: done.append(name))
    assert one.wait(30) and done == ["a", "b"]
    assert two.pull() == ["checkpoints/slot-1.npy", "models/a", "models/b"]


def test_fetch_from_a_bucket_lists_nothing(bucket, monkeypatch):
    one, two = bucket
    write(one, "a.npy", b"more bars")
    one.push()
    monkeypatch.setattr(two.remote._files, "_list_objects", refuse)  # 640 shards must not be 640 listings
    assert two.fetch("a.npy").read_bytes() == b"more bars"
