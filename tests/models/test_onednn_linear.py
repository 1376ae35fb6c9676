"""A linear map by oneDNN is torch's, value and slopes; and is taken only where it is meant to be."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ml_factory.models import onednn_linear
from ml_factory.models.onednn_linear import LEAST, NARROW, OneDNNLinear, onednn_batched_linear, onednn_or_torch_linear

BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Shapes that oneDNN is given."""
    if not BOTH:
        pytest.skip("this torch has no MKL to be faster than, or no oneDNN")
    seen, ask = [], onednn_linear.ONEDNN
    monkeypatch.setattr(
        onednn_linear, "ONEDNN", lambda x, weight, *rest: seen.append(tuple(x.shape)) or ask(x, weight, *rest)
    )
    return seen


def test_onednn_entry_of_torch_is_available():
    """It is not documented: a torch without it would be slow, not wrong."""
    assert callable(onednn_linear.ONEDNN) == BOTH


@pytest.mark.parametrize("inputs, outputs", [(128, 64), (64, 200), (100, NARROW - 1), (NARROW - 1, 100), (16, 48)])
@pytest.mark.parametrize("shape", [(2100,), (70, 30), (7, 10, 30)])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_linear_values_and_gradients_equal_torch(inputs, outputs, shape, bias, calls):
    torch.manual_seed(0)
    ours = OneDNNLinear(inputs, outputs, bias=bias)
    exact = nn.Linear(inputs, outputs, bias=bias).double()
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, inputs)
    found = {}
    for layer in (ours, exact):
        mine = x.to(layer.weight.dtype, copy=True).requires_grad_()
        y = layer(mine)
        (y * torch.linspace(-1, 1, outputs, dtype=y.dtype)).square().sum().backward()
        found[layer] = [y.detach(), mine.grad, *(parameter.grad for parameter in layer.parameters())]
    for one, other in zip(found[ours], found[exact], strict=True):
        assert one.shape == other.shape and (one - other).norm() <= 2e-6 * other.norm()
    # Forward, the inputs' slope, and where both sides are wide the weights'.
    assert len(calls) == (2 + (min(inputs, outputs) >= NARROW) if x.numel() * outputs >= LEAST else 0)


def test_onednn_linear_single_row_without_batch_equals_torch(calls):
    layer, x = OneDNNLinear(2048, 1024), torch.randn(2048, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    assert y.shape == (1024,) and calls
    torch.testing.assert_close(y, functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x.grad, 2 * y @ layer.weight, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.weight.grad, 2 * torch.outer(y, x), atol=1e-4, rtol=1e-4)


def test_onednn_linear_transposed_input_without_gradient_equals_torch(calls):
    torch.manual_seed(0)
    layer, x = OneDNNLinear(96, 128), torch.randn(64, 96, 32).transpose(1, 2)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, functional.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.weight.grad, x.sum((0, 1)).expand(128, -1), atol=1e-3, rtol=1e-4)
    assert calls == [(64, 32, 96), (96, 2048)]


@pytest.mark.parametrize("maps", [1, 3])
def test_stacked_linear_maps_equal_batched_matmul(maps, calls):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(maps, 512, 64), torch.randn(maps, 64, 96), torch.randn(maps, 1, 96)
    found = {}
    for name, dtype in (("ours", torch.float32), ("exact", torch.float64)):
        given = [part.to(dtype, copy=True).requires_grad_() for part in (x, weight, bias)]
        y = onednn_batched_linear(*given) if name == "ours" else given[0] @ given[1] + given[2]
        y.square().sum().backward()
        found[name] = [y, *(part.grad for part in given)]
    for one, other in zip(found["ours"], found["exact"], strict=True):
        assert one.shape == other.shape and (one - other).norm() <= 2e-6 * other.norm()
    assert len(calls) == (3 if maps == 1 else 0)


def test_onednn_linear_repeated_runs_give_same_bits():
    torch.manual_seed(0)
    layer, x, bits = OneDNNLinear(128, 64), torch.randn(512, 128), set()
    for _ in range(3):
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        bits.add((y.detach().numpy().tobytes(), layer.weight.grad.numpy().tobytes()))
    assert len(bits) == 1


def test_onednn_linear_small_maps_other_dtypes_or_autocast_use_torch(calls):
    wide = torch.randn(LEAST // 64**2, 64)
    assert onednn_or_torch_linear(wide[:-1], torch.randn(64, 64)).shape == (len(wide) - 1, 64)
    onednn_or_torch_linear(wide.double(), torch.randn(64, 64).double())
    onednn_or_torch_linear(wide.to("meta"), torch.randn(64, 64, device="meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert onednn_or_torch_linear(wide, torch.randn(64, 64)).dtype == torch.bfloat16
    assert calls == []
    onednn_or_torch_linear(wide, torch.randn(64, 64))
    assert calls == [tuple(wide.shape)]


def test_onednn_linear_under_torch_compile_uses_torch(calls):
    wide, weight = torch.randn(LEAST // 64**2, 64), torch.randn(64, 64)
    torch._dynamo.reset()
    compiled = torch.compile(onednn_or_torch_linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(wide, weight), functional.linear(wide, weight), atol=1e-4, rtol=1e-4)
    assert calls == []


def test_onednn_linear_second_derivative_raises_runtime_error():
    layer, x = OneDNNLinear(128, 64), torch.randn(512, 128, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
