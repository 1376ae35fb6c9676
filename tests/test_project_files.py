"""Versions, pinned actions and hooks of the project's files; badges, verbs and links of its pages."""

import ast
import importlib
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import ml_factory
from ml_factory.models.registry import available_models
from ml_factory.notebook import NOTEBOOKS
from tests.contract.doors import verbs
from tests.notebook_lint import FOLDER, ROOT, owner_and_ref, source_of

README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
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


def test_readme_notebook_rows_match_question_minutes_and_badge():
    slug, _ = owner_and_ref()
    for name in NOTEBOOKS:
        head = source_of(json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"][0])
        row = next(line for line in README.splitlines() if line.startswith(f"| [{name}](colab_notebooks/{name}.ipynb)"))
        _, _, question, minutes, badge, _ = (part.strip() for part in row.split("|"))
        assert f"**Question.** {question}\n" in head
        assert re.search(rf"\*\*Minutes\*\* {re.escape(minutes)}(?![\w]| to)", head), name
        assert f"https://colab.research.google.com/github/{slug}/blob/main/colab_notebooks/{name}.ipynb" in badge


def test_guide_verbs_and_models_match_cli_and_registry():
    reported = set(re.findall(r"^python -m ml_factory ([a-z-]+)", GUIDE, re.MULTILINE))
    assert set(verbs()) - {"tpu"} <= reported
    models = re.search(r"Models: (.*?)\.\n", GUIDE, re.DOTALL).group(1)
    assert re.findall(r"`(\w+)`", models) == available_models()


def test_markdown_links_and_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#:\s]+)\)", text)
        assert [link for link in links if not (path.parent / Path(link)).exists()] == [], path
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, path


def test_markdown_anchors_match_headings():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", path.read_text(encoding="utf-8")):
            page = (path.parent / link if link else path).read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings], (
                path,
                anchor,
            )


def test_guide_python_blocks_import_existing_names():
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("ml_factory"):
                module = importlib.import_module(node.module)
                assert [item.name for item in node.names if not hasattr(module, item.name)] == [], node.module


@pytest.mark.parametrize(("name", "most"), [("README.md", 110), ("CONTRIBUTING.md", 60), ("CHANGELOG.md", 60)])
def test_project_pages_stay_within_line_limits(name, most):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most
