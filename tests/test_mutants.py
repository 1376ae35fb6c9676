"""The mutation tool on a library of three files: what it changes, which tests it chooses, what it says of none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "ml_factory/__init__.py": "",
    "ml_factory/inner/__init__.py": "",
    "ml_factory/inner/deep/__init__.py": "",
    "ml_factory/inner/deep/sums.py": "def total(a, b=1):\n    return (\n        a\n        + b\n    )\n",
    "ml_factory/inner/service.py": "async def answer(x):\n    if x > 2:\n        return 1\n    return 0\n",
    "ml_factory/kernels.py": (
        "def njit(function):\n    return staticmethod(function).__func__\n\n\n"
        "@njit\ndef _kernel(x):\n    return x * 3\n\n\n"
        "def tripled(x):\n    return _kernel(x)\n"
    ),
    "ml_factory/lonely.py": "def nobody(x):\n    return not x\n",
    "tests/contract/test_public.py": (
        "from ml_factory.inner.deep.sums import total\n\n\ndef test_total():\n    assert total(2) == 3\n"
    ),
    "tests/test_all.py": (
        "import asyncio\nimport pytest\nfrom ml_factory.inner.service import answer\n"
        "from ml_factory.inner.deep.sums import total\nfrom ml_factory.kernels import tripled\n\n\n"
        "@pytest.fixture(scope='module')\ndef sum_():\n    return total(2)\n\n\n"
        "def test_first_user_of_fixture(sum_):\n    assert sum_\n\n\n"
        "def test_second_user_of_fixture(sum_):\n    assert sum_ == 3\n\n\n"
        "def test_answer():\n    assert asyncio.run(answer(3)) == 1 and asyncio.run(answer(2)) == 0\n\n\n"
        "def test_tripled():\n    assert tripled(2) == 6\n"
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("library") / "project"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "tests" / "mutants.py").write_text((ROOT / "tests" / "mutants.py").read_text())
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib -p pytest_timeout"\n'
    )
    return root


def mutate(root: Path, *words: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "tests.mutants", "--json", "report.json", *words]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # seconds for each of some twenty processes
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    report = json.loads((root / "report.json").read_text()) if (root / "report.json").exists() else []
    return done, {(one["site"], one["suite"]): (one["outcome"], one["by"]) for one in report}


def test_mutants_meet_the_tests_that_run_their_line_and_an_untested_site_is_an_error(library):
    done, found = mutate(library, "--record", "--seconds", "60", "--", "tests")
    assert done.returncode == 1, done.stdout + done.stderr
    assert found.pop(("ml_factory/lonely.py:nobody#0", "")) == ("NO TEST", "")
    assert "1 sites that no recorded test runs" in done.stderr and "lonely.py:nobody#0" in done.stderr
    killers = {site: by for (site, _), (outcome, by) in found.items() if outcome == "killed"}
    assert killers["ml_factory/inner/service.py:answer#0"] == "tests/test_all.py::test_answer"
    assert killers["ml_factory/kernels.py:_kernel#0"] == "tests/test_all.py::test_tripled"
    assert {site for site in killers if "deep/sums.py:total" in site} == {
        "ml_factory/inner/deep/sums.py:total#0",
        "ml_factory/inner/deep/sums.py:total#1",
    }

    done, found = mutate(library, "--only", "sums", "--suite", "contract", "--suite", "old", "--seconds", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {suite: by for (site, suite), (_, by) in found.items() if site.endswith("#0")} == {
        "contract": "tests/contract/test_public.py::test_total",
        "old": "tests/test_all.py::test_second_user_of_fixture",
    }
    assert "contract: 2 of 2 mutants killed" in done.stdout and "killed by old, not by contract: 0" in done.stdout

    (library / "ml_factory" / "lonely.py").write_text("")
    done, _ = mutate(library)
    assert done.returncode == 1 and "changed since the record. Next: --record" in done.stderr
