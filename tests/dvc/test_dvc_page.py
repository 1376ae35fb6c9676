"""The commands of docs/dvc.md, run as they stand, with a folder in the place of the bucket: `make soak PART=dvc`.

Runs in the environment of DVC, with the standard library and pytest alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dvc.md"
DVC = Path(sys.executable).with_name("dvc")
pytestmark = pytest.mark.skipif(not DVC.exists(), reason="DVC is in an environment of its own: make soak PART=dvc")
IDENTITY = {f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def commands() -> list[str]:
    """The blocks of commands, in the order of the page."""
    return re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_dvc_page_commands_store_bars_and_restore_them_elsewhere(tmp_path):
    remote, workspace, elsewhere = (tmp_path / name for name in ("remote", "workspace", "elsewhere"))
    elsewhere.mkdir()
    environment = {
        **os.environ,
        **IDENTITY,
        "HOME": str(tmp_path),
        "DVC_NO_ANALYTICS": "1",
        "DVC_SITE_CACHE_DIR": str(tmp_path),
    }
    environment["PATH"] = f"{DVC.parent}{os.pathsep}{os.environ['PATH']}"

    def run(text: str, folder: Path) -> None:
        text = text.replace("gs://bucket/dvc", str(remote)).replace("ADDRESS", str(workspace))
        subprocess.run(["sh", "-ec", text], cwd=folder, env=environment, check=True, timeout=300)

    bars = workspace / "data" / "raw" / "MES_1m.parquet"
    for folder in ("data/raw", "models", "checkpoints"):
        (workspace / folder).mkdir(parents=True)
    march, april = os.urandom(200_000), os.urandom(250_000)
    bars.write_bytes(march)
    begin, three, other_machine = commands()
    assert [line.split()[1] for line in three.splitlines()] == ["remote", "add", "push"]
    commit = "git add .dvc data/raw.dvc data/.gitignore && git commit -qm bars"
    run(begin + three + commit, workspace)
    assert bars.read_bytes() == march and not bars.is_symlink() and any(path.is_file() for path in remote.rglob("*"))
    bars.write_bytes(april)
    run("\n".join(three.splitlines()[1:]) + "\n" + commit, workspace)
    run(other_machine, elsewhere)
    restored = elsewhere / "workspace" / "data" / "raw" / "MES_1m.parquet"
    assert restored.read_bytes() == april and not restored.is_symlink()
    run("git checkout -q HEAD~1 data/raw.dvc && dvc pull", restored.parents[2])
    assert restored.read_bytes() == march
