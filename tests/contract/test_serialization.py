"""A state comes back exactly, or is refused by name."""

import math
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError, NonFiniteError, WorkspaceError
from tests.contract.doors import deserialize_state, pack_state, read_state_file, serialize_state


def same(a, b) -> bool:
    """Equal types, shapes and bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.contiguous().reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) else a == b


numbers = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.text(max_size=8), st.binary(max_size=8)
)
dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.unicode_string_dtypes(max_len=4),
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
trees = st.recursive(
    numbers | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 2**70), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(max_size=3), trees, max_size=4))
def test_encode_state_round_trip_is_exact_and_bytes_are_canonical(state):
    data = serialize_state(state)
    back = deserialize_state(data)
    assert same(state, back)
    assert serialize_state(back) == data


def test_encode_state_round_trips_format_tags_scalars_strides_and_order():
    tags = {"dict": {"array": ["0", "<f4", []]}, "tree": 1, "0": {"int": "0x1"}, "": {"tensor": None}}
    assert same(tags, deserialize_state(serialize_state(tags)))
    base = np.arange(24.0).reshape(4, 6)
    state = {"s": np.float32(2.5), "d": np.datetime64("2026-01-02", "ns"), "v": base[::2, ::-3],
             "f": np.asfortranarray(base)}  # fmt: skip
    back = deserialize_state(serialize_state(state))
    assert same({**state, "v": state["v"].copy(), "f": base}, back)
    back["v"][0, 0] = 1.0  # what comes back is the caller's own


@pytest.mark.parametrize(
    "dtype", ["bool", "uint16", "int64", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"]
)
def test_encode_state_round_trips_tensors_of_each_dtype_shape_and_view(dtype):
    for shape in ((), (0, 3), (2, 3)):
        tensor = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
        back = deserialize_state(serialize_state({"t": tensor}))["t"]
        assert same(tensor, back)
        back.zero_()
    tensor = (torch.arange(6).reshape(2, 3) * (1 + 2j)).to(torch.complex64)
    for view in (tensor.T, tensor[:, 1:], tensor.conj(), tensor.imag):
        assert torch.equal(view.resolve_conj().resolve_neg(), deserialize_state(serialize_state({"t": view}))["t"])


class _Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (print, "builtin"), ({1, 2}, "set"), (_Text("a"), "_Text"), (np.array([None]), "dtype object"),
        (np.zeros(2, [("a", "i4")]), "dtype"), (np.ma.masked_array([1.0], [True]), "MaskedArray"),
        ({1.5: 0}, "float"), (torch.eye(2).to_sparse(), "sparse"),
    ],
)  # fmt: skip
def test_encode_state_of_unsupported_type_raises_with_type_and_path(value, name):
    with pytest.raises(CheckpointError) as caught:
        serialize_state({"ok": 1, "deep": [0, {"x": value}]})
    assert name in str(caught.value) and "state['deep'][1]['x']" in str(caught.value)


def test_encode_state_of_self_reference_or_non_dict_raises():
    loop = {}
    loop["again"] = [loop]
    with pytest.raises(CheckpointError, match="hold itself"):
        serialize_state(loop)
    with pytest.raises(CheckpointError, match="dict"):
        serialize_state([1])


class _Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code ran')",))


def test_decode_state_of_torn_or_foreign_bytes_raises(tmp_path):
    data = serialize_state({"a": np.arange(5), "b": "text", "t": torch.ones(3)})
    foreign = (pickle.dumps(_Bomb()), b"PK\x03\x04", save({"a": np.zeros(2)}), b"{}" * 100, data + b"x")
    for damaged in (*foreign, *(data[:size] for size in range(len(data)))):
        with pytest.raises(CheckpointError):
            deserialize_state(damaged)
    with pytest.raises(WorkspaceError, match="absent"):
        read_state_file(tmp_path / "absent")
    (tmp_path / "torn").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="torn"):
        read_state_file(tmp_path / "torn")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"call":["os.system","true"]}', "unknown kind"), ('{"array":["0","|O",[4]]}', "never loaded"),
        ('{"tensor":["0","nn",[4]]}', "unknown kind"),
        ('{"tensor":["0","bfloat16",[100000000000]]}', "4 bytes"), ('[{"bytes":"0"},{"bytes":"0"}]', "KeyError"),
        ("1", "1 arrays that no value names"),
    ],
)  # fmt: skip
def test_decode_state_of_hostile_tree_raises(value, words):
    def file(tree: str) -> bytes:
        return save({"0": np.zeros(4, np.uint8), "tree": np.frombuffer(tree.encode(), np.uint8)})

    with pytest.raises(CheckpointError, match=words):
        deserialize_state(file(f'{{"version":1,"state":{{"dict":{{"a":{value}}}}}}}'))
    with pytest.raises(CheckpointError, match=r"later version.*version 2.*update"):
        deserialize_state(file('{"version":2,"state":{"dict":{}}}'))


# ---------------------------------------------------------------- the format, and what is never saved

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("bad", "at"), [(NAN, 0), (INF, 131_071), (-INF, 131_072), (NAN, 299_999)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_non_finite_tensor_raises_with_name(bad, dtype, at):
    weights = torch.linspace(-3, 3, 300_000).to(dtype)
    state = {"step": 3, "network": {"good": torch.ones(3), "w": weights}}
    pack_state(state, finite=True)
    weights[at] = bad
    with pytest.raises(NonFiniteError, match=r"\['network'\]\['w'\]"):
        pack_state(state, finite=True)
    deserialize_state(serialize_state(state))  # a finished artifact is not asked


def test_non_finite_arrays_of_training_alone_are_refused_and_keep_the_last_checkpoint(tmp_path):
    kept = {
        "memory": {"best_loss": INF, "history": [{"val_loss": NAN}]},
        "p": [np.array([[NAN, 0.5], [INF, 1]])],
        "network": {"attention_mask": torch.tensor([0.0, -INF]), "large": torch.full((1000,), 3e38)},
        "optimizer": {"v": np.full(10, 1e300)},  # finite, and its square is not
    }
    with CheckpointManager(tmp_path, run="r") as manager:
        manager.save_checkpoint("p", kept, force=True)
        for name in ("weights", "optimizer", "ema"):
            with pytest.raises(NonFiniteError, match=rf"\['{name}'\].*1 of"):
                manager.save_checkpoint("p", {name: [{"m": np.array([1.0, NAN])}]}, force=True)
        found = manager.load_latest_checkpoint("p")["state"]
    np.testing.assert_equal([found[name] for name in ("memory", "p")], [kept[name] for name in ("memory", "p")])
    assert all(torch.equal(found["network"][name], value) for name, value in kept["network"].items())


def test_deepest_state_that_is_stored_is_loaded():
    state: dict = {}
    for _ in range(99):
        state = {7: state}  # a key that is no text takes most levels
    assert deserialize_state(serialize_state({"deep": state})) == {"deep": state}
