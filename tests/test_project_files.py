"""Versions, pinned actions and hooks in the files that GitHub, PyPI and pre-commit read."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import ml_factory

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_project_version_is_equal_in_package_citation_and_pinned_tag():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ml_factory.__version__
    assert TABLE["tool"]["ml_factory"]["ref"] == f"v{ml_factory.__version__}"
    assert citation["license"] == TABLE["project"]["license"]
    assert citation["repository-code"] == TABLE["project"]["urls"]["Homepage"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_actions_are_pinned_by_hash_with_version_comment(path):
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: *(.*)", text)
    pinned = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d[\d.]*")
    assert used and [line for line in used if not pinned.fullmatch(line)] == []
    assert all("timeout-minutes" in job for job in yaml.safe_load(text)["jobs"].values())


def test_workflow_actions_have_one_version_across_workflows():
    used = {line for path in WORKFLOWS for line in re.findall(r"uses: *(.*)", path.read_text(encoding="utf-8"))}
    names = [line.split("@")[0] for line in used]
    assert sorted(names) == sorted(set(names))


def test_pre_commit_hooks_cover_commands_of_make_lint():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    commands = re.findall(r"-m (ruff \w+|[\w.]+)", lint)
    assert local["repo"] == "local" and len(commands) >= 3
    hooks = [hook["entry"] for hook in local["hooks"]]
    assert [command for command in commands if not any(f"-m {command}" in entry for entry in hooks)] == []


@pytest.mark.parametrize("quote", ["'", '"', "`", "$$("])
@pytest.mark.parametrize(
    ("target", "variables"),
    [("run", ("SYMBOL", "DATA", "WORKSPACE")), ("badges", ("OWNER",)), ("colab", ("COLAB",))],
    ids=["run", "badges", "colab"],
)
def test_make_with_quotes_in_a_value_runs_nothing_of_it(target, variables, quote, tmp_path):
    value = f"a{quote}; touch {tmp_path / 'ran'}; echo {quote}"
    given = [f"{name}={value}" for name in variables]
    command = ["make", "-s", "-C", str(ROOT), target, "PY=echo", "PYTHON=echo", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not (tmp_path / "ran").exists() and "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
