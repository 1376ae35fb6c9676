"""Small trainings of recipes sdce and t5 on texts that are made up."""

import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ml_factory.recipes import sdce
from ml_factory.recipes.sdce_run import SdceSettings, run_sdce
from ml_factory.recipes.t5 import run_t5
from ml_factory.storage.workspace import Workspace
from ml_factory.training.spec import TrainSpec

WORDS = ("the", "king", "and", "queen", "of", "night", "went", "to", "see", "a", "small", "cat", "on", "its", "mat",
         "while", "rain", "fell", "over", "hills")  # fmt: skip


def die_at(call: int, monkeypatch):
    """Make the loss fail at its nth call, as a machine that vanishes."""
    calls = []

    def dying(loss, network, batch, real=sdce.SurrogateLoss.__call__):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(loss, network, batch)

    monkeypatch.setattr(sdce.SurrogateLoss, "__call__", dying)


def write_text(path: Path, words: int = 3000) -> Path:
    """Sentences in which words follow each other by a rule, with some noise."""
    drawn, at, out = random.Random(0), 0, []
    for _ in range(words):
        at = (at * 3 + 1) % len(WORDS) if drawn.random() < 0.8 else drawn.randrange(len(WORDS))
        out.append(WORDS[at] + ("\n" if drawn.random() < 0.1 else ""))
    path.write_text(" ".join(out))
    return path


SMALL = {"base_model": "builtin:tiny", "surrogate_model": "builtin:tiny", "surrogate_dtype": "float32",
         "surrogate_k": 8,
         "probability_threshold": 0.001, "max_seq_length": 64, "validation_share": 0.1, "device": "cpu", "threads": 1,
         "num_epochs": 2, "batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 3e-3,
         "mixed_precision": "no", "save_seconds": 0.0, "log_steps": 1}  # fmt: skip


@pytest.fixture
def sdce_settings(tmp_path, monkeypatch):
    """Call it with values: small settings of a training in this test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    text = write_text(tmp_path / "text.txt", 1500)

    def of(output: str = "out", **values) -> SdceSettings:
        return SdceSettings(**SMALL | {"dataset": str(text), "output_dir": str(tmp_path / output)} | values)

    return of


def trained_sdce(settings: SdceSettings, **more) -> dict:
    lines: list[str] = []
    result = run_sdce(**asdict(settings), mirror="off", on_status=lines.append, **more)
    return result | {"lines": lines}


def weights(result: dict) -> dict[str, np.ndarray]:
    return load_file(Path(result["model"]) / "model.safetensors")


def t5_settings(made_up: int = 200, **training) -> dict:
    given = {"epochs": 2, "batch": 16, "lr": 3e-3, "patience": 0, "eval_batch": 64, "device": "cpu",
             "precision": "fp32", "threads": 1, "save_seconds": 0.0, "log_steps": 1}  # fmt: skip
    return {"training": TrainSpec(**given | training), "made_up": made_up, "vocabulary": 120, "max_length": 32}


def trained_t5(folder: Path, settings: dict, **more) -> dict:
    return run_t5(Workspace(folder), **settings, on_status=str, **more)
