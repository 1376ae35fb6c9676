"""Write the file list of docs/architecture.md from the docstrings of the files: `make map`, and part of `make format`.

Each file stands with the first sentence of its docstring; those of the library in the order of imports that
tests/test_import_order.py holds. Standard library only, so that it runs before anything is installed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- written by `make map` -->\n", "<!-- end of what `make map` writes -->\n"


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring, in one line; empty where there is none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()))[0].removesuffix(".")


def line(path: Path) -> str:
    """One row of a list: the file's name, which links to it, and what it holds."""
    return f"- [{path.name}](../{path.relative_to(ROOT).as_posix()}): {first_sentence(path)}\n"


def sections() -> Iterator[tuple[str, list[Path]]]:
    """Heading and files of each section: the library in the order of imports, then what surrounds it."""
    order = re.search(
        r'MAP_TEXT = """(.*?)"""', (ROOT / "tests" / "test_import_order.py").read_text("utf-8"), re.DOTALL
    )
    files = [ROOT.joinpath("ml_factory", *name.split(".")).with_suffix(".py") for name in order[1].split()]
    written_folders: set[Path] = set()
    for folder, together in groupby(files, key=lambda path: path.parent):
        again = folder in written_folders  # files that stand between and after packages
        written_folders.add(folder)
        about = "" if again else f"{first_sentence(folder / '__init__.py')}.\n\n"
        yield f"### {folder.relative_to(ROOT)}/{' (continued)' if again else ''}\n\n{about}", list(together)
    for folder in ("utils", "benchmarks", ".ci"):
        yield f"### {folder}/\n\n", sorted(path for path in (ROOT / folder).glob("*.py") if path.stem != "__init__")


def written(text: str) -> str:
    """`text` of docs/architecture.md with its file list as the files are now."""
    head, rest = text.split(BEGIN)
    listed = "\n".join(heading + "".join(map(line, files)) for heading, files in sections())
    return head + BEGIN + "\n" + listed + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    page = ROOT / "docs" / "architecture.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{page.relative_to(ROOT)}: written\n")
