"""A graph of ONNX in the making: named tensors, constants, and the operators that models and scalers need.

The opsets are pinned, so that the same model gives the same graph with every version of the onnx package.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ml_factory.inference.onnx_models import IR, ML, ML_OPSET, OPSET, TREES

_TYPES = {"float": TensorProto.FLOAT, "double": TensorProto.DOUBLE, "int64": TensorProto.INT64}


class OnnxGraph:
    """Nodes and constants of one graph; each method adds nodes and returns the name of their output."""

    def __init__(self) -> None:
        self._nodes: list = []
        self._constants: list = []
        self._inputs: list = []
        self._count = 0

    def input(self, name: str, shape: Sequence[str | int]) -> str:
        """Add a float32 input; a text in the shape is an axis of any length."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        return name

    def constant(self, value: object, dtype: type = np.float64) -> str:
        """Add a constant array."""
        name = self._name("constant")
        self._constants.append(numpy_helper.from_array(np.array(value, dtype, order="C"), name))
        return name

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        """Add a node with one output."""
        name = self._name(operator.lower())
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def named(self, x: str, name: str) -> str:
        """Add a copy of a tensor under a name by which it is found again."""
        self._nodes.append(helper.make_node("Identity", [x], [name], name=name))
        return name

    def cast(self, x: str, to: str) -> str:
        """Cast to "float", "double" or "int64"."""
        return self.add("Cast", x, to=_TYPES[to])

    def softmax(self, scores: str) -> str:
        """Return the softmax over the last axis."""
        return self.add("Softmax", scores, axis=-1)

    def tree_ensemble(self, x: str, name: str = "", **attributes: object) -> str:
        """Add an ensemble of trees (`TreeEnsemble` of ai.onnx.ml 5) that sums its leaves by class.

        name : of the node, by which it is found again.
        """
        output = self.add(TREES, x, domain=ML, aggregate_function=1, post_transform=0, **attributes)
        self._nodes[-1].name = name or output
        return output

    def inline(self, model: onnx.ModelProto, x: str) -> str:
        """Add a whole model of one input and one output, whose input is `x`."""
        prefix = self._name("network") + "/"
        (own,) = [one.name for one in model.graph.input]
        graph = onnx.compose.add_prefix(model, prefix).graph
        self._nodes.append(helper.make_node("Identity", [x], [prefix + own], name=prefix + "input"))
        self._nodes += graph.node
        self._constants += graph.initializer
        return graph.output[0].name

    def to_model(self, output: str, name: str, shape: Sequence[str | int], facts: Mapping[str, str]) -> bytes:
        """Return the bytes of the checked model.

        output : tensor (float64) that it gives, called `name`.
        facts : texts stored with it.
        """
        self._nodes.append(helper.make_node("Identity", [output], [name], name="output"))
        out = helper.make_tensor_value_info(name, TensorProto.DOUBLE, list(shape))
        graph = helper.make_graph(self._nodes, "ml_factory", self._inputs, [out], self._constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(ML, ML_OPSET)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="ml_factory")
        helper.set_model_props(model, dict(facts))
        onnx.checker.check_model(model)
        return model.SerializeToString(deterministic=True)

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{what}_{self._count}"


def graph_with_output(graph: bytes, tensor: str) -> bytes:
    """Return a written graph with another of its tensors, of the same type and shape, as its output."""
    model = onnx.load_from_string(graph)
    model.graph.output[0].name = tensor
    return model.SerializeToString()
