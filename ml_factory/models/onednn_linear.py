"""Linear maps of float32 on a CPU by oneDNN, where torch itself would call MKL.

MKL leaves half of the vector units of non-Intel processors idle: 90 GFLOP/s per core on AMD with AVX-512, where oneDNN,
the other library in torch, reaches 220. On AVX2 both are equally fast.

M rows, I inputs, O outputs.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Least multiplications for oneDNN, and least width for transposing a gradient.
LEAST, NARROW = 2**21, 64


def _onednn():
    """Return torch's entry to oneDNN, which `torch.compile` uses too; None in a torch without it, or without MKL."""
    there = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if there else None


ONEDNN = _onednn()


class OneDNNLinear(nn.Linear):
    """`nn.Linear` computed by `linear`: the same weights by the same names."""

    def forward(self, x: Tensor) -> Tensor:
        return onednn_or_torch_linear(x, self.weight, self.bias)


def onednn_or_torch_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute `functional.linear`, x (..., I) -> (..., O), by the faster library."""
    here = x.device.type == "cpu" and x.dtype == weight_OI.dtype == torch.float32
    if not here or not should_use_onednn(x.numel() * len(weight_OI)):
        return functional.linear(x, weight_OI, bias_O)
    return _Linear.apply(x, weight_OI, bias_O)


def onednn_batched_linear(x_VMI: Tensor, weight_VIO: Tensor, bias_V1O: Tensor) -> Tensor:
    """Compute V linear maps at once, (V, M, O); a single one by `linear`."""
    if len(x_VMI) == 1:
        return onednn_or_torch_linear(x_VMI[0], weight_VIO[0].mT, bias_V1O[0, 0])[None]
    return torch.baddbmm(bias_V1O, x_VMI, weight_VIO)


def should_use_onednn(multiplications: int) -> bool:
    """Return True where a linear map of so many float32 multiplications on a CPU should run on oneDNN."""
    # bf16 runs on oneDNN anyway, and a compiler chooses itself.
    others = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return ONEDNN is not None and not others and multiplications >= LEAST


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return _product(x, weight_OI, bias_O)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx, slope: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight_OI), (wants_x, wants_weight, wants_bias) = ctx.saved_tensors, ctx.needs_input_grad
        slope_MO = slope.reshape(-1, slope.shape[-1])
        return (
            _product(slope, weight_OI.t()) if wants_x else None,
            _turned(slope_MO, x.reshape(-1, x.shape[-1])) if wants_weight else None,
            slope_MO.sum(0) if wants_bias else None,
        )


def _turned(slope_MO: Tensor, x_MI: Tensor) -> Tensor:
    """Return slope^T x (O, I). oneDNN transposes one of them in memory: the narrower one."""
    outputs, inputs = slope_MO.shape[1], x_MI.shape[1]
    if min(outputs, inputs) < NARROW:
        return slope_MO.t() @ x_MI
    return _product(slope_MO.t(), x_MI.t()) if outputs <= inputs else _product(x_MI.t(), slope_MO.t()).t()


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias by oneDNN, without autograd."""
    return ONEDNN(x, weight_OI, bias_O, "none", [], "")
