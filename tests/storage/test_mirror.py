"""A mirror whose remote answers wrongly, lists, or is called while it works: what its public doors cannot show."""
# ruff: noqa: F811 - fixtures of the contract

from pathlib import Path

import pytest

from ml_factory.errors import WorkspaceError
from ml_factory.storage.remote import MountedFolder
from tests.contract.test_mirror import bucket, drive, machines, refuse, write  # noqa: F401 - fixtures
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


def test_fetch_from_a_bucket_lists_nothing(bucket, monkeypatch):
    one, two = bucket
    write(one, "a.npy", b"more bars")
    one.push()
    monkeypatch.setattr(two.remote._files, "_list_objects", refuse)  # 640 shards must not be 640 listings
    assert two.fetch("a.npy").read_bytes() == b"more bars"
