"""README's badges, verbs and links and the map of docs/architecture.md, held to the tree as it is."""

import json
import re
from pathlib import Path

from ml_factory.__main__ import app
from ml_factory.models.registry import available_models
from ml_factory.notebook import NOTEBOOKS
from tests.notebook_lint import FOLDER, ROOT, owner_and_ref, source_of
from tests.test_import_order import MAP

README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def on_the_map(text: str) -> list[str]:
    """Paths of the map from top to bottom; folders end with a slash."""
    block = re.search(r"## The map\n.*?```text\n(.*?)```", text, re.DOTALL).group(1)
    above, paths = [], []
    for line in filter(str.strip, block.splitlines()):
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], name]
        paths.append("".join(above))
    return paths


def modules(folder: str) -> set[str]:
    found = (path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py"))
    return {path for path in found if not path.endswith("__init__.py")}


def test_every_module_is_on_the_map_once_and_every_name_on_it_exists():
    paths = on_the_map(ARCHITECTURE)
    assert len(paths) == len(set(paths))
    assert modules("ml_factory") | modules("utils") <= set(paths)
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []
    assert [path for path in paths if path.endswith("/") is not (ROOT / path).is_dir()] == []


def test_the_map_is_in_import_order():
    files = [path for path in on_the_map(ARCHITECTURE) if path.startswith("ml_factory/") and path.endswith(".py")]
    assert [path.removeprefix("ml_factory/").removesuffix(".py").replace("/", ".") for path in files] == MAP


def test_every_line_of_the_map_says_what_is_there():
    block = ARCHITECTURE.split("```text\n")[1].split("```")[0]
    assert [line for line in block.splitlines() if line.endswith(".py") and len(line.split()) < 2] == []


def test_each_notebook_has_its_row_with_its_own_question_minutes_and_badge():
    slug, _ = owner_and_ref()
    for name in NOTEBOOKS:
        head = source_of(json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"][0])
        row = next(line for line in README.splitlines() if line.startswith(f"| [{name}](colab_notebooks/{name}.ipynb)"))
        _, _, question, minutes, badge, _ = (part.strip() for part in row.split("|"))
        assert f"**Question.** {question}\n" in head
        assert re.search(rf"\*\*Minutes\*\* {re.escape(minutes)}(?![\w]| to)", head), name
        assert f"https://colab.research.google.com/github/{slug}/blob/main/colab_notebooks/{name}.ipynb" in badge


def test_the_verbs_and_models_are_those_that_exist():
    told = set(re.findall(r"^python -m ml_factory ([a-z-]+)", README, re.MULTILINE))
    assert told == {command.name or command.callback.__name__ for command in app.registered_commands}
    models = re.search(r"Models: (.*?)\. ", README, re.DOTALL).group(1)
    assert re.findall(r"`(\w+)`", models) == available_models()


def test_links_and_targets_lead_somewhere():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    documents = {
        ROOT / "README.md": README,
        ROOT / "docs" / "architecture.md": ARCHITECTURE,
        ROOT / "CONTRIBUTING.md": CONTRIBUTING,
    }
    documents |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    for path, text in documents.items():
        links = re.findall(r"\]\(([^)#:\s]+)\)", text)
        assert [link for link in links if not (path.parent / Path(link)).exists()] == [], path
        assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets, path


def test_contributing_is_short():
    assert len(CONTRIBUTING.splitlines()) < 60
