"""The gate at thresholds: a written graph with one changed node, and rows that come to every inner node."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ml_factory.errors import FactoryError
from ml_factory.inference import onnx_export, onnx_gate, onnx_threshold_rows
from ml_factory.inference.onnx_ensemble import OnnxEnsemble
from ml_factory.inference.onnx_leaves import find_other_leaf
from ml_factory.inference.onnx_threshold_rows import rows_at_thresholds
from ml_factory.inference.onnx_trees import LESS, TreeNodes, tree_nodes
from ml_factory.inference.predict import FittedModels
from tests.inference.test_onnx import BOOSTERS, fitted_model, gate, rows

DEEP = {"xgboost": 6, "lightgbm": 6, "catboost": 5}
FLIPPED, UP, DOWN = "missing side flipped", "threshold one number up", "threshold one number down"


def deep_model(name: str) -> FittedModels:
    return fitted_model(name, rounds=1, threads=1, depth=DEEP[name], min_leaf=2)


def change(graph: bytes, name: str, value) -> bytes:
    """Return the graph with `value(array)` in the place of one attribute of its only ensemble."""
    model = onnx.load_from_string(graph)
    (node,) = [one for one in model.graph.node if one.op_type == "TreeEnsemble"]
    (attribute,) = [one for one in node.attribute if one.name == name]
    if attribute.HasField("t"):
        attribute.t.CopyFrom(numpy_helper.from_array(value(numpy_helper.to_array(attribute.t).copy()), name))
    else:
        changed = value(np.array(attribute.ints))
        del attribute.ints[:]
        attribute.ints.extend(changed.tolist())
    return model.SerializeToString()


def change_node(graph: bytes, kind: str, place: int) -> bytes:
    """Return the graph with one inner node changed."""

    def flipped(sides):
        sides[place] = 1 - sides[place]
        return sides

    def moved(splits):
        splits[place] = moved_threshold(splits[place], kind)
        return splits

    return (
        change(graph, "nodes_missing_value_tracks_true", flipped)
        if kind == FLIPPED
        else change(graph, "nodes_splits", moved)
    )


def moved_threshold(threshold: float, kind: str) -> np.float32:
    return np.nextafter(np.float32(threshold), np.float32(np.inf if kind == UP else -np.inf))


def steps_to(nodes: TreeNodes, node: int) -> Iterator[tuple[int, bool]]:
    """Yield the nodes above, and whether the path turns left there."""
    above = {int(child): (at, left) for left, side in ((True, nodes.left), (False, nodes.right))
             for at, child in enumerate(side) if child >= 0}  # fmt: skip
    while node in above:
        node, left = above[node]
        yield node, left


def goes_left(nodes: TreeNodes, node: int, value: np.float32) -> bool:
    if np.isnan(value):
        return bool(nodes.missing_left[node])
    threshold = nodes.threshold[node]
    return bool(value < threshold if nodes.mode == LESS else value <= threshold)


def comes_to(nodes: TreeNodes, node: int, value: np.float32) -> bool:
    """Return whether any row comes to a node with this value in its column, tried value by value."""
    steps = list(steps_to(nodes, node))
    for column in {int(nodes.column[at]) for at, _ in steps} | {int(nodes.column[node])}:
        own = [(at, left) for at, left in steps if nodes.column[at] == column]
        tried = [np.float32(np.nan)]
        for at, _ in own:
            tried += [nodes.threshold[at], *(moved_threshold(nodes.threshold[at], kind) for kind in (UP, DOWN))]
        tried = [value] if column == nodes.column[node] else tried
        if not any(all(goes_left(nodes, at, one) == left for at, left in own) for one in tried):
            return False
    return True


def value_that_shows(nodes: TreeNodes, node: int, kind: str) -> np.float32:
    """Return the one value that takes another side at a changed node."""
    threshold, less = nodes.threshold[node], nodes.mode == LESS
    if kind == FLIPPED:
        return np.float32(np.nan)
    if kind == UP:
        return threshold if less else moved_threshold(threshold, UP)
    return moved_threshold(threshold, DOWN) if less else threshold


@pytest.mark.parametrize("name", BOOSTERS)
def test_gate_of_graph_with_any_inner_node_changed_catches_it(name):
    """Only the bytes of the graph are changed. Leaves show all changes that any row can come to, attributes all."""
    fitted = deep_model(name)
    graph, trees = onnx_export.onnx_of_models(fitted, {}), fitted.models[name].model_state["fitted"]
    nodes = tree_nodes(name, trees)
    wanted, made = OnnxEnsemble.of_nodes(nodes, name), rows_at_thresholds(nodes, np.zeros((7, 3), np.float32))
    inner = np.flatnonzero(nodes.left >= 0)
    assert OnnxEnsemble.in_graph(graph, name).find_difference(wanted) is None
    assert find_other_leaf(name, trees, OnnxEnsemble.in_graph(graph, name), nodes, made.x_MK) is None
    assert made.nodes == made.tried == len(inner) > 30 and len(made.x_MK) > 2 * made.reached
    shown = 0
    for place, node in enumerate(inner):
        for kind in (FLIPPED, UP, DOWN):
            changed = OnnxEnsemble.in_graph(change_node(graph, kind, place), name)
            assert changed.find_difference(wanted)[0].endswith(f", {place + 1} of {len(inner)}")
            seen = find_other_leaf(name, trees, changed, nodes, made.x_MK) is not None
            assert seen == comes_to(nodes, int(node), value_that_shows(nodes, int(node), kind)), (place, kind)
            shown += seen
    assert shown > len(inner)


@pytest.mark.parametrize("name", BOOSTERS)
def test_gate_of_graph_with_other_comparison_raises(name, monkeypatch):
    fitted = fitted_model(name, rounds=5, threads=1)
    swapped = change(onnx_export.onnx_of_models(fitted, {}), "nodes_modes", lambda modes: 1 - modes)
    with pytest.raises(FactoryError, match=rf"trees of {name} have other nodes in the ONNX.*nodes_modes, 1 of \d+"):
        gate(fitted, swapped)
    monkeypatch.setattr(OnnxEnsemble, "find_difference", lambda *given: None)  # the leaves alone show it
    with pytest.raises(FactoryError, match=rf"trees of {name} take other leaves.*tree \d+ of 15, input \d of 3 at"):
        gate(fitted, swapped)


def test_gate_of_graph_with_one_missing_side_flipped_raises():
    fitted = deep_model("xgboost")
    graph = onnx_export.onnx_of_models(fitted, {})
    with pytest.raises(FactoryError, match=r"other nodes in the ONNX graph.*missing_value_tracks_true, 31 of .*got"):
        gate(fitted, change_node(graph, FLIPPED, 30), features=rows(seed=9).fillna(0.0))


def test_gate_of_model_whose_nodes_are_misread_raises(monkeypatch):
    """The graph is as the exporter means it to be: only the booster's own library shows the fault."""
    fitted = deep_model("xgboost")
    nodes = tree_nodes("xgboost", fitted.models["xgboost"].model_state["fitted"])
    deep = [node for node in np.flatnonzero(nodes.left >= 0) if len(list(steps_to(nodes, int(node)))) == 5]
    node = next(node for node in deep if comes_to(nodes, int(node), np.float32(np.nan)))
    side = nodes.missing_left.copy()
    side[node] = not side[node]
    misread = dataclasses.replace(nodes, missing_left=side)
    for module in (onnx_export, onnx_gate):
        monkeypatch.setattr(module, "tree_nodes", lambda *given: misread)
    with pytest.raises(FactoryError, match=r"trees of xgboost take other leaves.*at (np.float32\()?nan"):
        gate(fitted, features=rows(seed=9).fillna(0.0))


def test_gate_of_graph_without_the_trees_raises():
    fitted = fitted_model("xgboost", rounds=2, threads=1)
    model = onnx.load_from_string(onnx_export.onnx_of_models(fitted, {}))
    for node in model.graph.node:
        node.name = ""
    with pytest.raises(FactoryError, match=r"does not have the trees of xgboost.*wanted \['TreeEnsemble'\]"):
        gate(fitted, model.SerializeToString())


def test_gate_result_counts_inner_nodes_and_draws_from_many(monkeypatch):
    fitted = deep_model("catboost")
    found = gate(fitted)
    assert found.nodes == found.nodes_tried == 3 * 31 >= found.nodes_reached > 31
    monkeypatch.setattr(onnx_threshold_rows, "MOST_NODES", 20)
    drawn = gate(fitted)
    assert (drawn.nodes, drawn.nodes_tried) == (93, 20) and 0 < drawn.nodes_reached <= 20
    assert drawn.threshold_rows <= 80


@pytest.mark.parametrize("name", ["xgboost", "lightgbm"])
def test_gate_of_trees_that_are_one_leaf_each_passes(name):
    """ONNX has no such tree: it is written as a split with two leaves of the same value."""
    found = gate(fitted_model(name, rounds=2, threads=1, min_leaf=1e6))
    assert found.nodes == 0 and found.difference < 1e-6
