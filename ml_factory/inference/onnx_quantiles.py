"""Quantile scaling as nodes of ONNX: a tree for each column finds the knots around a value, and the rank lies between.

Ranks are those of `QuantileScaler`; the normal deviate is AS 241 (Wichura 1988), within 1e-15 of SciPy's.
"""

from collections.abc import Sequence

import numpy as np

from ml_factory.datasets.scaling import QuantileScaler
from ml_factory.inference.onnx_graph import OnnxGraph
from ml_factory.inference.onnx_trees import LESS_OR_EQUAL, TreeNodes

_SMALLEST = 1e-300
_CENTRE = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
     3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
     1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR_TAIL = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def add_quantile_scaling(graph: OnnxGraph, x: str, scaler: QuantileScaler) -> str:
    """Add a quantile scaler; return float32 values of the shape of `x`, missing ones at 0."""
    columns = len(scaler.knots)
    shape = graph.add("Shape", x)
    rows = graph.add("Reshape", x, graph.constant([-1, columns], np.int64))
    limit = float(np.finfo(np.float32).max)  # an infinite value lies beyond the last knot, as this one does
    missing = graph.add("IsNaN", rows)
    values = graph.add("Clip", graph.cast(rows, "double"), graph.constant(-limit), graph.constant(limit))
    found = _interval_trees(scaler.knots).add_to(graph, rows, targets=3 * columns)
    share, slope, knot = (_part(graph, found, place * columns, columns) for place in range(3))
    rank = graph.add("Add", share, graph.add("Mul", slope, graph.add("Sub", values, knot)))
    rank = graph.add("Where", missing, graph.constant(0.5), rank)
    if scaler.shape == "uniform":
        scaled = graph.add("Sub", graph.add("Mul", rank, graph.constant(2.0)), graph.constant(1.0))
    else:
        deviate = _normal_deviate(graph, rank)
        scaled = graph.add("Clip", deviate, graph.constant(-scaler.clip), graph.constant(scaler.clip))
    scaled = graph.add("Where", missing, graph.constant(0.0), scaled)
    return graph.cast(graph.add("Reshape", scaled, shape), "float")


def _part(graph: OnnxGraph, x: str, first: int, count: int) -> str:
    return graph.add("Slice", x, *(graph.constant([one], np.int64) for one in (first, first + count, 1)))


def _interval_trees(knots_FK: np.ndarray) -> TreeNodes:
    """Return three trees for each column, whose leaves give the share at the knot below a value, the slope from there
    to the next knot, and that knot.
    """
    parts, roots = [], []
    columns = len(knots_FK)
    for place, kind in [(place, kind) for kind in range(3) for place in range(columns)]:
        edges, leaves_L3 = _intervals(knots_FK[place])
        roots.append(sum(len(part[0]) for part in parts))
        threshold, left, right, value = _balanced(edges, leaves_L3[:, kind])
        first = roots[-1]
        inner = left >= 0
        parts.append((
            np.full(len(left), place), threshold, np.zeros(len(left), bool), np.where(inner, left + first, -1),
            np.where(inner, right + first, -1), value, np.full(len(left), kind * columns + place),
            np.arange(len(left)),
        ))  # fmt: skip
    joined = [np.concatenate(part) for part in zip(*parts, strict=True)]
    return TreeNodes(*joined, np.array(roots, np.int64), LESS_OR_EQUAL)


def _intervals(knots_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return upper edges of the intervals but the last (float64, rising), and (share, slope, knot) of each interval.

    Among equal knots the middle of their shares holds at that value.
    """
    shares = np.linspace(0, 1, len(knots_K))
    unique, first = np.unique(knots_K, return_index=True)
    last = np.append(first[1:], len(knots_K)) - 1
    edges, leaves = [np.nextafter(unique[0], -np.inf)], [(0.0, 0.0, 0.0)]
    for place, value in enumerate(unique):
        if first[place] < last[place]:
            edges.append(value)
            leaves.append(((shares[first[place]] + shares[last[place]]) / 2, 0.0, 0.0))
        if place + 1 < len(unique):
            rise = shares[first[place + 1]] - shares[last[place]]
            edges.append(np.nextafter(unique[place + 1], -np.inf))
            leaves.append((shares[last[place]], rise / (unique[place + 1] - value), value))
    if first[-1] == last[-1]:
        edges.append(unique[-1])
        leaves.append((1.0, 0.0, 0.0))
    return np.array(edges), np.array([*leaves, (1.0, 0.0, 0.0)])


def _balanced(edges: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return threshold, left, right and value of a balanced tree over intervals, in preorder; -1: no child."""
    nodes: list[list[float]] = []

    def grow(low: int, high: int) -> int:
        place = len(nodes)
        nodes.append([0.0, -1, -1, values[low]])
        if low < high:
            middle = (low + high) // 2
            nodes[place] = [edges[middle], grow(low, middle), grow(middle + 1, high), 0.0]
        return place

    grow(0, len(edges))
    threshold, left, right, value = np.array(nodes).T
    return threshold, left.astype(np.int64), right.astype(np.int64), value


def _normal_deviate(graph: OnnxGraph, p: str) -> str:
    """Return the normal deviate of probabilities (float64); those of 0 and 1 are beyond any limit that is used."""
    one, half = graph.constant(1.0), graph.constant(0.5)
    q = graph.add("Sub", p, half)
    centre = graph.add("Sub", graph.constant(0.180625), graph.add("Mul", q, q))
    near = graph.add("Mul", q, _ratio(graph, centre, _CENTRE))
    smaller = graph.add("Max", graph.add("Min", p, graph.add("Sub", one, p)), graph.constant(_SMALLEST))
    root = graph.add("Sqrt", graph.add("Neg", graph.add("Log", smaller)))
    tail = _ratio(graph, graph.add("Sub", root, graph.constant(1.6)), _TAIL)
    far = _ratio(graph, graph.add("Sub", root, graph.constant(5.0)), _FAR_TAIL)
    beyond = graph.add("Where", graph.add("LessOrEqual", root, graph.constant(5.0)), tail, far)
    signed = graph.add("Where", graph.add("Less", q, graph.constant(0.0)), graph.add("Neg", beyond), beyond)
    return graph.add("Where", graph.add("LessOrEqual", graph.add("Abs", q), graph.constant(0.425)), near, signed)


def _ratio(graph: OnnxGraph, r: str, coefficients: Sequence[Sequence[float]]) -> str:
    above, below = (_polynomial(graph, r, part) for part in coefficients)
    return graph.add("Div", above, below)


def _polynomial(graph: OnnxGraph, r: str, coefficients: Sequence[float]) -> str:
    total = graph.constant(coefficients[-1])
    for one in coefficients[-2::-1]:
        total = graph.add("Add", graph.add("Mul", total, r), graph.constant(one))
    return total
