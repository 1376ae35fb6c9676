"""A slice whose gcloud is the stand-in on the PATH."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from ml_factory.tpu import gcloud
from ml_factory.tpu.gcloud import Gcloud
from ml_factory.tpu.settings import VARIABLES, read_settings
from ml_factory.tpu.slice import Slice
from tests.tpu import gcloud_stand_in

VALUES = {"PROJECT_ID": "my-project", "TPU_NAME": "my-tpu", "ZONE": "us-central2-b", "ACCELERATOR_TYPE": "v4-32",
          "BUCKET": "my-bucket"}  # fmt: skip


class Play:
    """The stand-in's folder with a slice on it; `say` collects what the slice prints."""

    def __init__(self, folder: Path, scenario: dict, values: dict[str, str]):
        self.folder, self.config, self.lines = folder, folder / "tpu.yaml", []
        (folder / "scenario.json").write_text(json.dumps(scenario))
        given = VALUES | {"CODE_DIR": str(folder / "code")} | values
        self.config.write_text("\n".join(f"{name}: {value}" for name, value in given.items()))

    def open(self, dry_run: bool = False) -> Slice:
        say, settings = self.lines.append, read_settings(self.config)
        common = f"--project={settings['PROJECT_ID']}", "--quiet"
        called = Gcloud(*common, dry_run=dry_run, pause=0.0, say=say)
        return Slice(settings, called, self.folder / "files", 0.01, say)

    def calls(self) -> list[dict]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def count(self, words: str) -> int:
        return sum(words in " ".join(one["words"]) for one in self.calls())


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Play]:
    """Return a function that makes a Play from a scenario and values of settings."""
    for name in (*VARIABLES, "XLA_USEBF16"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "bin" / "gcloud"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{gcloud_stand_in.__file__}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("STAND_IN", str(tmp_path))

    def answered(command: list[str], input: str = "", **_) -> subprocess.CompletedProcess:
        """Stands for subprocess.run: the stand-in in this process."""
        out, err, code = StringIO(), StringIO(), 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                gcloud_stand_in.run(tmp_path, command[1:], input)
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    monkeypatch.setattr(gcloud, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": answered}))
    code = tmp_path / "code"
    (code / "recipes").mkdir(parents=True)
    (code / "train.py").write_text("print('trained')\n")
    (code / "recipes/config_tinyllama_tpuv4.yaml").write_text("training:\n  output_dir: gs://your-bucket-name/sdce\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(code), *words], check=True, timeout=60)

    return lambda scenario, **values: Play(tmp_path, scenario, values)
