"""Content that an ONNX graph of this library may have, and its check before onnxruntime reads a stored one.

Only the fields declared here are read: a graph with anything else (data in other files, functions, subgraphs such as
loops, sparse or text tensors, other types) is refused, as are operators that the exporter does not write.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from ml_factory.errors import CheckpointError
from ml_factory.lazy_module import LazyModule
from ml_factory.limited_fork import failure_in_fork

descriptors = LazyModule("google.protobuf.descriptor_pb2")  # comes with onnxruntime
pools = LazyModule("google.protobuf.descriptor_pool")
factory = LazyModule("google.protobuf.message_factory")

OPSET, ML_OPSET, IR, ML = 20, 5, 10, "ai.onnx.ml"
INPUT, OUTPUT = "features", "probabilities"
TREES = "TreeEnsemble"
OPERATORS = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Constant", "Conv", "Div", "Elu", "Equal", "Erf", "Exp",
    "Einsum",
    "Expand", "Flatten", "Floor", "GRU", "Gather", "Gelu", "Gemm", "GatherElements", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "LSTM", "LayerNormalization", "Less", "LessOrEqual", "Log", "LogSoftmax",
    "MatMul", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pad", "Pow", "ReduceMax", "ReduceL2", "ReduceMean", "ReduceMin",
    "ReduceSum", "Relu", "Reshape", "Round", "Shape", "Sigmoid", "Slice", "Softmax", "Softplus", "Split", "Sqrt",
    "Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
_MOST_PARTS, _MOST_DIMENSIONS = 20_000, 8
_SPARE_BYTES, _SECONDS = 256 << 20, 20
_BYTES = {1: 4, 6: 4, 7: 8, 9: 1, 11: 8, 2: 1, 3: 1}  # by ONNX's code: float, int32, int64, bool, double, uint8, int8
_FLOAT, _DOUBLE = 1, 11
# Message -> field -> (number, type, whether repeated); the numbers are those of onnx.proto.
_TEXTS = {"key": (1, "string", False), "value": (2, "string", False)}
_NOTES = ("string", False)
_SCHEMA: dict[str, dict[str, tuple[int, str, bool]]] = {
    "Text": _TEXTS,
    "Opset": {"domain": (1, "string", False), "version": (2, "int64", False)},
    "Dimension": {"dim_value": (1, "int64", False), "dim_param": (2, "string", False)},
    "Shape": {"dim": (1, "Dimension", True)},
    "TensorType": {"elem_type": (1, "int32", False), "shape": (2, "Shape", False)},
    "Type": {"tensor_type": (1, "TensorType", False)},
    "Value": {"name": (1, "string", False), "type": (2, "Type", False), "doc_string": (3, *_NOTES),
              "metadata_props": (4, "Text", True)},
    "Tensor": {"dims": (1, "int64", True), "data_type": (2, "int32", False), "float_data": (4, "float", True),
               "int32_data": (5, "int32", True), "int64_data": (7, "int64", True), "name": (8, "string", False),
               "raw_data": (9, "bytes", False), "double_data": (10, "double", True), "doc_string": (12, *_NOTES),
               "metadata_props": (16, "Text", True)},
    "Attribute": {"name": (1, "string", False), "f": (2, "float", False), "i": (3, "int64", False),
                  "s": (4, "bytes", False), "t": (5, "Tensor", False), "floats": (7, "float", True),
                  "ints": (8, "int64", True), "doc_string": (13, *_NOTES), "type": (20, "int32", False)},
    "Node": {"input": (1, "string", True), "output": (2, "string", True), "name": (3, "string", False),
             "op_type": (4, "string", False), "attribute": (5, "Attribute", True), "doc_string": (6, *_NOTES),
             "domain": (7, "string", False), "metadata_props": (9, "Text", True)},
    "Graph": {"node": (1, "Node", True), "name": (2, "string", False), "initializer": (5, "Tensor", True),
              "doc_string": (10, *_NOTES), "input": (11, "Value", True), "output": (12, "Value", True)},
    "Model": {"ir_version": (1, "int64", False), "producer_name": (2, "string", False),
              "producer_version": (3, "string", False), "domain": (4, "string", False),
              "model_version": (5, "int64", False), "doc_string": (6, *_NOTES), "graph": (7, "Graph", False),
              "opset_import": (8, "Opset", True), "metadata_props": (14, "Text", True)},
}  # fmt: skip


def check_onnx_content(graph: bytes, lookback: int, features: int, where: object = None) -> None:
    """Check that a graph is one that this library may have written, for rows of so many features.

    lookback : rows of its windows; 0 for single rows.
    Raises CheckpointError naming what it has that it may not have.
    """
    model = _parsed(graph, where)
    opsets = {one.domain: one.version for one in model.opset_import}
    if not opsets.items() <= {"": OPSET, ML: ML_OPSET}.items() or model.ir_version > IR or len(model.opset_import) > 2:
        raise _refused("operators of another set", where, f"{opsets}, version {model.ir_version}", f"opset {OPSET}")
    nodes, tensors = model.graph.node, model.graph.initializer
    if max(len(nodes), len(tensors)) > _MOST_PARTS:
        raise _refused("too many parts", where, f"{len(nodes)} nodes, {len(tensors)} constants", f"{_MOST_PARTS}")
    rows = ("N", lookback, features) if lookback else ("N", features)
    for values, wanted in ((model.graph.input, (INPUT, _FLOAT, rows)), (model.graph.output, (OUTPUT, _DOUBLE, None))):
        found = [_signature(one) for one in values]
        expected = (*wanted[:2], ("N", 3)) if wanted[2] is None else wanted
        if found != [expected]:
            raise _refused("other inputs or outputs", where, str(found)[:120], str(expected))
    for node in nodes:
        if (node.domain, node.op_type) != (ML, TREES) and (node.domain or node.op_type not in OPERATORS):
            name = f"{node.domain}:{node.op_type}"[:80] if node.domain else node.op_type[:80]
            raise _refused("an operator that is not exported", where, name, "those of the exporter")
        if node.op_type == TREES:
            _check_trees({one.name: one for one in node.attribute}, features, where)
    for tensor in _tensors(model):
        _check_tensor(tensor, where)


def try_onnx_in_fork(run: Callable[[], object], size: int, where: object = None) -> None:
    """Run a graph of so many bytes in a fork of this process, with limits of memory and time.

    run : loads the graph and predicts a few rows.
    Raises CheckpointError where it takes more than a graph of its size may, fails, or ends the process.
    """

    def tried() -> None:
        try:
            run()
        except Exception as error:  # onnxruntime has no error of its own for memory that it does not get
            raise MemoryError from error

    memory = _SPARE_BYTES + 8 * size
    failure = failure_in_fork(tried, memory=memory, cpu_seconds=_SECONDS, seconds=2.0 * _SECONDS)
    if failure:
        raise _refused("what this onnxruntime cannot run", where, failure, f"at most {memory >> 20} MB")


def _parsed(graph: bytes, where: object) -> Any:
    """Return the message. Raises CheckpointError for bytes that are none, or have fields that are not declared."""
    model = _model_class()()
    try:
        model.ParseFromString(graph)
    except Exception as error:  # DecodeError, whose module is not imported before it is needed
        raise _refused("bytes that are no graph", where, " ".join(str(error).split())[:120], "") from error
    size = model.ByteSize()
    model.DiscardUnknownFields()
    if model.ByteSize() != size:
        got = f"{size - model.ByteSize()} bytes of other fields"
        raise _refused("parts that are not exported", where, got, "no subgraphs, functions or data in other files")
    return model


@cache
def _model_class() -> Any:
    """Return the class of the message `Model`, in a pool of its own."""
    file = descriptors.FileDescriptorProto(name="ml_factory_onnx.proto", package="ml_factory_onnx", syntax="proto2")
    kinds = descriptors.FieldDescriptorProto
    for message, fields in _SCHEMA.items():
        made = file.message_type.add(name=message)
        for name, (number, kind, repeated) in fields.items():
            one = made.field.add(name=name, number=number)
            one.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in _SCHEMA:
                one.type, one.type_name = kinds.TYPE_MESSAGE, f".ml_factory_onnx.{kind}"
            else:
                one.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool = pools.DescriptorPool()
    pool.Add(file)
    return factory.GetMessageClass(pool.FindMessageTypeByName("ml_factory_onnx.Model"))


def _signature(value: Any) -> tuple:
    """Return name, type and shape of an input or output; every axis of any length is N."""
    kind = value.type.tensor_type
    return value.name, kind.elem_type, tuple("N" if one.dim_param else one.dim_value for one in kind.shape.dim)


def _tensors(model: Any) -> Iterator[Any]:
    yield from model.graph.initializer
    for node in model.graph.node:
        yield from (one.t for one in node.attribute if one.HasField("t"))


def _check_tensor(tensor: Any, where: object) -> None:
    """Raise CheckpointError for a constant whose values are not those of its shape."""
    stored = [tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data]
    size = _BYTES.get(tensor.data_type, 0)
    wanted = math.prod(tensor.dims) if min(tensor.dims, default=0) >= 0 else -1
    values = len(tensor.raw_data) / size if size and tensor.HasField("raw_data") else max(map(len, stored))
    if not size or len(tensor.dims) > _MOST_DIMENSIONS or values != wanted:
        got = f"{tensor.name[:60]}: type {tensor.data_type}, shape {list(tensor.dims)[:9]}, {values:g} values"
        raise _refused("a constant of another size", where, got, "as many values as its shape has")


def _check_trees(attributes: Mapping[str, Any], features: int, where: object) -> None:
    """Raise CheckpointError where nodes do not form trees: each is reached once, so that no walk is endless."""
    try:
        inner, leaves = len(attributes["nodes_featureids"].ints), len(attributes["leaf_targetids"].ints)
        sides = [(np.array(attributes[f"nodes_{side}nodeids"].ints), np.array(attributes[f"nodes_{side}leafs"].ints))
                 for side in ("true", "false")]  # fmt: skip
        ids, is_leaf = (np.concatenate(part) for part in zip(*sides, strict=True))
        reached = np.concatenate([np.array(attributes["tree_roots"].ints, np.int64), ids[is_leaf == 0]])
        ends, columns = ids[is_leaf != 0], np.array(attributes["nodes_featureids"].ints)
        targets = np.array(attributes["leaf_targetids"].ints)
        outputs = attributes["n_targets"].i
        sound = np.array_equal(np.sort(reached), np.arange(inner)) and np.array_equal(np.sort(ends), np.arange(leaves))
        sound = sound and 0 <= columns.min(initial=0) <= columns.max(initial=0) < features
        sound = sound and 0 <= targets.min(initial=0) <= targets.max(initial=0) < outputs <= _MOST_PARTS
    except (KeyError, ValueError, IndexError, OverflowError):  # lists of unequal lengths, values out of range
        sound = False
    if not sound:
        raise _refused("trees whose nodes are missing, or reached twice", where, "", "each node once")


def _refused(what: str, where: object, got: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"The ONNX graph in this bundle has {what}", where=where, got=got or "nothing that fits", wanted=wanted,
        next_step="export it again from the workspace (python -m ml_factory export); pip install --upgrade onnxruntime",
    )  # fmt: skip
