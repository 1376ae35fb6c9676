"""The trees of a booster in a written ONNX graph: the ensemble's node itself, its attributes, and its sums alone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ml_factory.errors import FactoryError
from ml_factory.inference.onnx_graph import OnnxGraph
from ml_factory.inference.onnx_models import ML, TREES, OnnxModels
from ml_factory.inference.onnx_trees import TreeNodes, ensemble_name


@dataclass(frozen=True)
class OnnxEnsemble:
    """A node `TreeEnsemble` as it stands in a graph.

    attributes : name -> value as `onnx.helper.make_node` takes it.
    """

    attributes: Mapping[str, object]

    @classmethod
    def in_graph(cls, graph: bytes, name: str) -> "OnnxEnsemble":
        """Return the ensemble of the booster `name`. Raises FactoryError where the graph does not have just one."""
        wanted = ensemble_name(name)
        found = [node for node in onnx.load_from_string(graph).graph.node if node.name == wanted]
        if [(node.domain, node.op_type) for node in found] != [(ML, TREES)]:
            raise FactoryError(
                f"The ONNX graph does not have the trees of {name}, and is not written", where=wanted,
                got=[node.op_type for node in found], wanted=[TREES],
                next_step="export the bundle alone, and report this",
            )  # fmt: skip
        return cls({one.name: helper.get_attribute_value(one) for one in found[0].attribute})

    @classmethod
    def of_nodes(cls, nodes: TreeNodes, name: str) -> "OnnxEnsemble":
        """Return the ensemble that the exporter writes for these trees."""
        graph = OnnxGraph()
        scores = nodes.add_to(graph, graph.input("rows", ["N", int(nodes.column.max()) + 1]), name=ensemble_name(name))
        return cls.in_graph(graph.to_model(scores, "scores", ["N", 3], {}), name)

    def sums(self, columns: int, targets: int, **changed: object) -> Callable[[np.ndarray], np.ndarray]:
        """Return rows (N, columns) -> sums of leaves, float64 (N, targets), of this node alone in a graph.

        changed : attributes with other values.
        """
        graph = OnnxGraph()
        x = graph.cast(graph.input("rows", ["N", columns]), "double")
        output = graph.add(TREES, x, domain=ML, **{**self.attributes, **changed, "n_targets": targets})
        models = OnnxModels(graph.to_model(output, "sums", ["N", targets], {}), 0)
        return lambda x_NF: models.predict_rows(x_NF, np.arange(len(x_NF)))

    def find_difference(self, wanted: "OnnxEnsemble") -> tuple[str, object, object] | None:
        """Return the first attribute and place that differ, and both values there; None where all are equal."""
        names = sorted({*self.attributes, *wanted.attributes})
        for name in names:
            own, other = (_values(one.attributes.get(name, [])) for one in (self, wanted))
            if len(own) != len(other):
                return f"{name}, count", len(own), len(other)
            if (differ := np.flatnonzero(own != other)).size:
                place = int(differ[0])
                return f"{name}, {place + 1} of {len(own)}", own[place].item(), other[place].item()
        return None


def _values(value: object) -> np.ndarray:
    return np.atleast_1d(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value))
