"""Write the repository's owner into links, badges and bootstrap cells: `make badges OWNER=name`.

The owner stands in pyproject.toml, [tool.ml_factory] repository; everything else is rewritten from there.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITH_LINKS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "pyproject.toml")
OWNER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})")


def main(owner: str) -> int:
    if not OWNER.fullmatch(owner):
        print(f"make badges: {owner!r} is no name of a GitHub account. Next: make badges OWNER=name", file=sys.stderr)
        return 2
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ml_factory"]
    before, ref = settings["repository"], settings["ref"]
    after = f"{owner}/{before.split('/')[1]}"
    changed = [path for name in WITH_LINKS if (path := ROOT / name).is_file() and _rewrite_text(path, before, after)]
    for path in sorted((ROOT / "colab_notebooks").rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts and _rewrite_notebook(path, before, after, ref):
            changed.append(path)
    print(f"{after}: rewrote {', '.join(str(path.relative_to(ROOT)) for path in changed) or 'nothing'}")
    return 0


def _rewrite_text(path: Path, before: str, after: str) -> bool:
    """Only a whole owner/name: after a slash or a quote, and not inside a longer word."""
    old = path.read_text(encoding="utf-8")
    new = re.sub(rf"(?<=[/\"]){re.escape(before)}\b", after, old)
    path.write_text(new, encoding="utf-8")
    return new != old


def _rewrite_notebook(path: Path, before: str, after: str, ref: str) -> bool:
    """The links in its words, the bootstrap cell anew from its one text, and the canonical JSON form."""
    old = path.read_text(encoding="utf-8")
    notebook = json.loads(old)
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(rf"(?<=/){re.escape(before)}\b", after, text)
        elif "bootstrap" in cell["metadata"].get("tags", ()):
            text, cell["metadata"] = bootstrap_cell_text(after, ref), FOLDED
        cell["source"] = text.splitlines(keepends=True)
    new = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_text(new, encoding="utf-8")
    return new != old


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("make badges: say who: make badges OWNER=name", file=sys.stderr)
        raise SystemExit(2)
    sys.path.insert(0, str(ROOT))
    from utils.notebook_bootstrap import FOLDED, bootstrap_cell_text

    raise SystemExit(main(sys.argv[1]))
