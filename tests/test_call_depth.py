"""Calls between what a user calls and what is done: few enough to follow by hand."""

import ast
import os
import traceback
from pathlib import Path

from ml_factory import Workspace, pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.training import estimator

LIBRARY = Path(pipeline.__file__).parent
ROOT = LIBRARY.parent


def library_frames(first: str) -> list[tuple[str, str]]:
    """(file, function) of the library's frames from the function `first` inwards."""
    stack = [(Path(one.filename), one.name) for one in traceback.extract_stack()]
    frames = [(path.relative_to(LIBRARY).as_posix(), name) for path, name in stack if LIBRARY in path.parents]
    return frames[[name for _, name in frames].index(first) :]


def test_train_reaches_loss_within_seven_frames_and_five_files(prepared, monkeypatch):
    stacks, loss = [], estimator.weighted_cross_entropy
    monkeypatch.setattr(
        estimator, "weighted_cross_entropy", lambda *given: stacks.append(library_frames("train")) or loss(*given)
    )
    settings = {"epochs": 1, "hidden": 4, "layers": 1}
    pipeline.train(prepared, "DEMO", 5, "lstm", quick=True, model_settings=settings)
    steps = [frames for frames in stacks if ("training/loop.py", "take_training_step") in frames]
    assert steps and max(map(len, steps)) <= 7 and len({file for file, _ in steps[0]}) <= 5


def test_prepare_reaches_certificate_write_within_seven_frames(tmp_path, monkeypatch):
    stacks, replace = [], os.replace

    def recorded(source, target, **named):
        if Path(target).name == "h5.json":
            stacks.append(library_frames("prepare"))
        return replace(source, target, **named)

    workspace = Workspace(tmp_path / "w")
    ensure_synthetic_demo_market(workspace, "DEMO", days=8)
    monkeypatch.setattr(os, "replace", recorded)
    pipeline.prepare(workspace, "DEMO", (5,))
    written = [frames for frames in stacks if ("leakage/certificate.py", "write_certificate") in frames]
    assert written and max(map(len, written)) <= 7


def arguments_of(function: ast.FunctionDef) -> int:
    found = function.args
    every = [*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg]
    return len([one for one in every if one is not None and one.arg not in ("self", "cls")])


def test_public_calls_take_at_most_ten_arguments():
    long = {}
    for path in sorted([*LIBRARY.rglob("*.py"), *(ROOT / "utils").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            public = isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_"))
            if public and arguments_of(node) > 10:
                long[f"{path.relative_to(ROOT)}:{node.name}"] = arguments_of(node)
    assert long == {}
