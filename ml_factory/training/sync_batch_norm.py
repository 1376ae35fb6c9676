"""Batch normalisation over the rows of all processes, on any backend.

torch's own SyncBatchNorm runs on GPUs alone.
"""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d whose mean and variance in training are those of the rows of all processes.

    Of one process, or of SPMD devices, it is BatchNorm2d itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return super().forward(input)
        x_NCHW = input.float()
        axes, count = (0, 2, 3), x_NCHW.numel() // x_NCHW.shape[1] * distributed.get_world_size()
        mean_C = all_reduce(x_NCHW.sum(axes)) / count
        centred_NCHW = x_NCHW - mean_C[None, :, None, None]
        variance_C = all_reduce(centred_NCHW.square().sum(axes)) / count
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)
        scale_C = self.weight * torch.rsqrt(variance_C + self.eps)
        out_NCHW = centred_NCHW * scale_C[None, :, None, None] + self.bias[None, :, None, None]
        return out_NCHW.to(input.dtype)
