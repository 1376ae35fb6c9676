"""Flame graph as one SVG file that any browser opens: a box per call, as wide as its time, below its caller.

The viewers that are kept up (speedscope, pyinstrument) read neither cProfile's nor torch's records into a file that
stands alone, so the boxes are written here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

_WIDTH, _ROW, _LETTER = 1200.0, 18, 7.0  # pixels: of the picture, of a row, of a letter
_SMALLEST = 0.5  # pixels of a box that is still drawn
_COLOURS = ("#f4a261", "#e9c46a", "#e76f51", "#f2cc8f", "#eb8f64", "#f6bd60")


@dataclass
class FlameBox:
    """Calls of one name by one chain of callers.

    seconds : in these calls, with all that they call.
    """

    name: str
    seconds: float = 0.0
    below: dict[str, "FlameBox"] = field(default_factory=dict)

    def child(self, name: str) -> "FlameBox":
        """Return the box of this name below, made where it is missing."""
        return self.below.setdefault(name, FlameBox(name))


def flame_graph_svg(root: FlameBox, title: str) -> str:
    """Return the SVG. Each box names itself, its seconds and its share when the pointer is on it."""
    boxes = list(_place(root, 0.0, _WIDTH, 0))
    height = (max(depth for *_, depth in boxes) + 2) * _ROW + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height}" width="{_WIDTH:.0f}" '
        f'height="{height}" font-family="monospace" font-size="11">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="4" y="13" font-weight="bold">{escape(title)}</text>',
    ]
    for box, left, width, depth in boxes:
        share = box.seconds / root.seconds if root.seconds else 0.0
        top, letters = (depth + 1) * _ROW + 2, int((width - 4) / _LETTER)
        label = escape(box.name if len(box.name) <= letters else box.name[: max(letters - 1, 0)] + "…")
        lines.append(
            f"<g><title>{escape(box.name)}: {box.seconds:.3f} s, {share:.1%}</title>"
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 1}" rx="1" '
            f'fill="{_COLOURS[sum(map(ord, box.name)) % len(_COLOURS)]}"/>'
            + (f'<text x="{left + 2:.1f}" y="{top + 12}">{label}</text>' if letters > 2 else "")
            + "</g>"
        )
    return "\n".join([*lines, "</svg>", ""])


def _place(box: FlameBox, left: float, width: float, depth: int) -> Iterator[tuple[FlameBox, float, float, int]]:
    """Yield (box, left edge, width, depth), the widest of each row first; boxes never leave that of their caller."""
    yield box, left, width, depth
    total = max(box.seconds, sum(one.seconds for one in box.below.values()))
    for one in sorted(box.below.values(), key=lambda one: (-one.seconds, one.name)):
        part = width * one.seconds / total if total else 0.0
        if part >= _SMALLEST:
            yield from _place(one, left, part, depth + 1)
            left += part
