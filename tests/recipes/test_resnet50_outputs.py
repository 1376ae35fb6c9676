"""Where recipe resnet50 reads and writes: buckets, weights of a finished run, logs of several hosts."""

import re
from pathlib import Path

import pytest

from ml_factory.recipes import run
from ml_factory.recipes.run import MODULES


@pytest.mark.parametrize("name", MODULES)
def test_run_of_a_recipe_is_one_of_the_modules_that_it_imports_and_no_other(name):
    found, todo = set(), {MODULES[name][0]}
    while todo:
        found.add(one := todo.pop())
        text = (Path(run.__file__).with_name(f"{one}.py")).read_text(encoding="utf-8")
        todo |= {*re.findall(r"from ml_factory\.recipes\.(\w+) import", text)} - found - {"run", "worker_log"}
    assert found == set(MODULES[name])
