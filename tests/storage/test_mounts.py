"""Mount detection by tables as real machines have them."""

import pytest

from ml_factory.storage import files as mounts


@pytest.mark.parametrize(
    ("table", "path", "remote"),
    [
        ("/dev/sda / ext4 rw", "/content/drive/MyDrive/x", False),
        ("/dev/sda / ext4 rw\ndrive /content/drive fuse.drive rw", "/content/drive/MyDrive/x", True),
        ("/dev/sda / ext4 rw\ndrive /content/drive fuse.drive rw", "/content/drives/x", False),
        ("host:/ /mnt/my\\040disk nfs4 rw\n/dev/sda / ext4 rw", "/mnt/my disk/x", True),
        ("over / fuse.fuse-overlayfs rw", "/x", False),
    ],
)
def test_what_is_a_mount(table, path, remote, monkeypatch, tmp_path):
    (tmp_path / "mounts").write_text("".join(f"{line} 0 0\n" for line in table.splitlines()))
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    assert (mounts.mount_of(path) is not None) is remote
