"""Graphs of unknown origin: whatever the exporter does not write is refused before onnxruntime reads it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ml_factory.errors import CheckpointError
from ml_factory.inference import onnx_export
from ml_factory.inference.onnx_content import check_onnx_content
from ml_factory.inference.onnx_models import OnnxModels
from tests.inference.test_onnx import NETWORKS, fitted_model


@pytest.fixture(scope="module")
def graph() -> bytes:
    return onnx_export.onnx_of_models(fitted_model("xgboost", rounds=5, threads=1), {"symbol": "DEMO"})


def first_output(model: onnx.ModelProto) -> str:
    """Put a node in front of the last one; return the name that it reads."""
    return model.graph.node[-1].input[0]


def insert(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Let the graph's output come through this node, which reads `first_output` and gives "x"."""
    model.graph.node.insert(len(model.graph.node) - 1, node)
    model.graph.node[-1].input[0] = "x"


def custom_operator(model):
    insert(model, helper.make_node("Steal", [first_output(model)], ["x"], domain="evil"))
    model.opset_import.append(helper.make_opsetid("evil", 1))


def unlisted_operator(model):
    insert(model, helper.make_node("RandomNormalLike", [first_output(model)], ["x"]))


def subgraph(model):
    body = helper.make_graph([], "body", [], [])
    insert(model, helper.make_node("Identity", [first_output(model)], ["x"], body=body))


def function(model):
    insert(model, helper.make_node("Identity", [first_output(model)], ["x"]))
    model.functions.append(helper.make_function("evil", "F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], []))


def external_data(model):
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "outside")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    model.graph.initializer.append(tensor)


def text_constant(model):
    model.graph.initializer.append(helper.make_tensor("t", TensorProto.STRING, [1], [b"text"]))


def constant_larger_than_its_values(model):
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "large")
    tensor.dims[0] = 1 << 40
    model.graph.initializer.append(tensor)


def negative_shape(model):
    tensor = numpy_helper.from_array(np.zeros(4, np.float32), "negative")
    tensor.dims[:] = [-2, -2]
    model.graph.initializer.append(tensor)


def sparse_constant(model):
    values = numpy_helper.from_array(np.ones(1, np.float32), "v")
    model.graph.sparse_initializer.append(
        helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64)), [1 << 40])
    )


def other_opset(model):
    model.opset_import[0].version = 21


def further_input(model):
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["N", 3]))


def other_columns(model):
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4


def other_output(model):
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT


def many_nodes(model):
    model.graph.node.extend([helper.make_node("Neg", ["features"], [f"n{i}"]) for i in range(20_001)])


def tree_attribute(name):
    def change(model):
        (node,) = [one for one in model.graph.node if one.op_type == "TreeEnsemble"]
        (found,) = [one for one in node.attribute if one.name == name]
        found.ints[0] = {"nodes_featureids": 3, "leaf_targetids": 3}.get(name, 0)

    change.__name__ = name
    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (custom_operator, "operators of another set"), (unlisted_operator, "an operator that is not exported.*Random"),
        (subgraph, "parts that are not exported"), (function, "parts that are not exported"),
        (external_data, "parts that are not exported"), (text_constant, "parts that are not exported"),
        (sparse_constant, "parts that are not exported"),
        (constant_larger_than_its_values, "a constant of another size.*large"),
        (negative_shape, "a constant of another size.*negative"),
        (other_opset, "operators of another set"), (further_input, "other inputs or outputs.*more"),
        (other_columns, "other inputs or outputs"), (other_output, "other inputs or outputs"),
        (many_nodes, "too many parts"),
        *((tree_attribute(name), "trees whose nodes are missing, or reached twice")
          for name in ("nodes_truenodeids", "nodes_featureids", "leaf_targetids")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_onnx_content_that_is_not_exported_is_refused_in_one_line(graph, change, words):
    model = onnx.load_from_string(graph)
    change(model)
    with pytest.raises(CheckpointError, match=f"The ONNX graph in this bundle has {words}") as error:
        check_onnx_content(model.SerializeToString(), 0, 3, "a.bundle")
    assert "\n" not in str(error.value) and "a.bundle" in str(error.value)


def test_onnx_content_of_exported_graphs_is_accepted(graph):
    check_onnx_content(graph, 0, 3)
    for name, settings in (("gru", NETWORKS["gru"]), ("patchtst", NETWORKS["patchtst"]), ("tcn", {"lookback": 16})):
        fitted = fitted_model(name, num_epochs=1, batch_size=64, threads=1, **settings)
        check_onnx_content(onnx_export.onnx_of_models(fitted, {}), fitted.lookback, 3)


def test_onnx_content_cut_short_or_damaged_is_refused_or_runs(graph):
    generator = np.random.default_rng(0)
    for size in (0, 1, len(graph) // 2, len(graph) - 1):
        with pytest.raises(CheckpointError):
            check_onnx_content(graph[:size], 0, 3)
    for _ in range(300):
        damaged = bytearray(graph)
        damaged[generator.integers(len(graph))] ^= 1 << generator.integers(8)
        try:
            check_onnx_content(bytes(damaged), 0, 3)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_onnx_graph_that_takes_gigabytes_is_refused_in_a_fork(graph):
    OnnxModels(graph, 0).checked(3)
    model = onnx.load_from_string(graph)
    model.graph.initializer.append(numpy_helper.from_array(np.array([60_000, 60_000]), "shape"))
    source = first_output(model)
    model.graph.node.insert(len(model.graph.node) - 1, helper.make_node("ReduceSum", [source], ["one"], keepdims=0))
    model.graph.node.insert(len(model.graph.node) - 1, helper.make_node("Expand", ["one", "shape"], ["wide"]))
    model.graph.node.insert(len(model.graph.node) - 1, helper.make_node("ReduceSum", ["wide"], ["sum"], keepdims=0))
    insert(model, helper.make_node("Add", [source, "sum"], ["x"]))
    with pytest.raises(CheckpointError, match=r"cannot run.*MemoryError.*at most 256 MB"):
        OnnxModels(model.SerializeToString(), 0).checked(3, "a.bundle")
