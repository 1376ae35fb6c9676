"""Where recipe resnet50 reads and writes: buckets, weights of a finished run, logs of several hosts."""

import re
from pathlib import Path

import pytest

from ml_factory.recipes import run
from ml_factory.recipes.run import MODULES, agree_on_run
from ml_factory.storage.workspace import Workspace
from ml_factory.training.distributed import ProcessGroup


def test_ranks_agree_on_the_run_of_rank_zero(tmp_path, monkeypatch):
    place, sent = Workspace(tmp_path), []

    def broadcast(self, state):
        sent.append(state)
        return sent[0]

    monkeypatch.setattr(ProcessGroup, "broadcast", broadcast)
    first, _ = agree_on_run(place, "t5", {"a": 1}, ProcessGroup(0, 2), fresh=True)
    first.folder.mkdir(parents=True)  # rank 0 was quicker
    second, done = agree_on_run(place, "t5", {"a": 1}, ProcessGroup(1, 2), fresh=True)
    assert second == first and done is None


@pytest.mark.parametrize("name", MODULES)
def test_run_of_a_recipe_is_one_of_the_modules_that_it_imports_and_no_other(name):
    found, todo = set(), {MODULES[name][0]}
    while todo:
        found.add(one := todo.pop())
        text = (Path(run.__file__).with_name(f"{one}.py")).read_text(encoding="utf-8")
        todo |= {*re.findall(r"from ml_factory\.recipes\.(\w+) import", text)} - found - {"run", "worker_log"}
    assert found == set(MODULES[name])
