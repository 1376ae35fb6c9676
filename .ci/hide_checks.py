"""Move what only tests read out of sight: asserts into a collapsed cell behind theirs, nbval's mark to a tag.

    python .ci/hide_checks.py colab_notebooks/01_data_pipeline.ipynb ...

Run it again after new asserts; a notebook without any stays as it is. The cells are collapsed in JupyterLab
(`source_hidden`) and in Colab (`cellView: form`), and run and checked as before.
"""

import ast
import json
import sys
from pathlib import Path

MARK = "# NBVAL_CHECK_OUTPUT\n"
TITLE = "#@title Checks\n"
HIDDEN = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["checks"]}


def hidden_checks(cells: list[dict]) -> list[dict]:
    """The cells, with every top-level assert in a collapsed cell behind the one it stood in."""
    return [part for cell in cells for part in _split(cell)]


def _split(cell: dict) -> list[dict]:
    tags = cell["metadata"].get("tags", [])
    if cell["cell_type"] != "code" or {"bootstrap", "parameters", "checks"} & set(tags):
        return [cell]
    source, metadata = "".join(cell["source"]), dict(cell["metadata"])
    if source.startswith(MARK):
        source, metadata["tags"] = source.removeprefix(MARK), [*tags, "nbval-check-output"]
    lines = source.splitlines()
    spans = [range(node.lineno - 1, node.end_lineno) for node in ast.parse(source).body if isinstance(node, ast.Assert)]
    taken = {line for span in spans for line in span}
    shown = "\n".join(line for number, line in enumerate(lines) if number not in taken).strip("\n")
    asserts = "\n".join(lines[line] for line in sorted(taken))
    parts = [{**cell, "source": shown.splitlines(keepends=True), "metadata": metadata}] if shown else []
    if asserts:
        text, name = TITLE + asserts, f"{cell['id']}-checks" if shown else cell["id"]
        parts.append({**cell, "id": name, "source": text.splitlines(keepends=True), "metadata": HIDDEN})
    return parts


def main(paths: list[str]) -> int:
    for path in map(Path, paths):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        notebook["cells"] = hidden_checks(notebook["cells"])
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
