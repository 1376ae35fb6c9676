"""A slice whose gcloud is the stand-in on the PATH."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ml_factory.tpu.gcloud import Gcloud
from ml_factory.tpu.settings import VARIABLES, read_settings
from ml_factory.tpu.slice import Slice

STAND_IN = Path(__file__).with_name("gcloud_stand_in.py")
VALUES = {"PROJECT_ID": "my-project", "TPU_NAME": "my-tpu", "ZONE": "us-central2-b", "ACCELERATOR_TYPE": "v4-32",
          "BUCKET": "my-bucket"}  # fmt: skip


class Play:
    """The stand-in's folder with a slice on it; `say` collects what the slice prints."""

    def __init__(self, folder: Path):
        self.folder, self.lines = folder, []

    def write(self, scenario: dict, **values: str) -> None:
        (self.folder / "scenario.json").write_text(json.dumps(scenario))
        text = "\n".join(
            f"{name}: {value}" for name, value in (VALUES | {"CODE_DIR": str(self.folder / "code")} | values).items()
        )
        self.config.write_text(text)

    @property
    def config(self) -> Path:
        return self.folder / "tpu.yaml"

    def open(self, dry_run: bool = False, longest: float = 60.0, seconds: float = 60.0) -> Slice:
        say, settings = self.lines.append, read_settings(self.config)
        common = f"--project={settings['PROJECT_ID']}", "--quiet"
        gcloud = Gcloud(*common, dry_run=dry_run, seconds=seconds, ssh_seconds=seconds, pause=0.0, say=say)
        return Slice(settings, gcloud, self.folder / "files", 0.01, longest, say)

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
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{STAND_IN}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    code = tmp_path / "code"
    (code / "recipes").mkdir(parents=True)
    (code / "train.py").write_text("print('trained')\n")
    (code / "recipes/config_tinyllama_tpuv4.yaml").write_text("training:\n  output_dir: gs://your-bucket-name/sdce\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(code), *words], check=True, timeout=60)

    def make(scenario: dict, **values: str) -> Play:
        one = Play(tmp_path)
        one.write(scenario, **values)
        return one

    return make
