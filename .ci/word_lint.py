"""Refuse private words in names, docstrings and texts of the code: `python .ci/word_lint.py [folder or file ...]`."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPENERS = re.compile(r"(What|Whether|Who|How|Where|When|Which|Those|That|It)\b")  # no verb and no noun
LINES = (ROOT / ".ci" / "private_words.txt").read_text(encoding="utf-8").splitlines()
TERMS = dict(line.split(maxsplit=1) for line in LINES if not line.startswith("#"))
OTHERS = {"ask", "tell"}  # methods of optuna's studies
IN_TEXT = {word: term for word, term in TERMS.items() if not term.startswith("name:")}


def words(name: str) -> set[str]:
    """Split an identifier at underscores and capitals."""
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, complaint) for the openings of docstrings, identifiers and string constants."""
    for node in ast.walk(ast.parse(source)):
        line, documented = getattr(node, "lineno", 1), isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (opening := OPENERS.match(ast.get_docstring(node) or "")):
            yield line, f"the docstring begins with {opening[0]!r}; wanted a verb or a noun phrase"
        fields = (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))
        for name in (field for field in fields if isinstance(field, str) and field not in OTHERS):
            yield from ((line, f"{name}: for {word!r} write {TERMS[word]}") for word in words(name) & set(TERMS))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = set(re.findall(r"[a-z]+", node.value.lower())) & set(IN_TEXT)
            yield from ((line, f"text: for {word!r} write {TERMS[word]}") for word in sorted(found))


if __name__ == "__main__":
    places = [Path(word) for word in sys.argv[1:]] or [ROOT / name for name in ("ml_factory", "utils", "benchmarks")]
    files = sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
    found = [f"{f}:{n}: {text}" for f in files for n, text in complaints(f.read_text(encoding="utf-8"))]
    sys.exit("\n".join(found) or None)
