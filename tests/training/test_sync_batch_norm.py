"""Batch normalisation over two processes equals that of one process with all rows."""

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, torch
from safetensors.torch import save_file
from torch import distributed
from ml_factory.training.sync_batch_norm import SyncBatchNorm2d

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
torch.manual_seed(0)
x = (torch.randn(8, 3, 4, 4) * 3 + 5)[rank::world].clone().requires_grad_()
norm = SyncBatchNorm2d(3)
out = norm(x)
(out ** 3).sum().backward()
gradient = norm.weight.grad.clone()
if world > 1:
    distributed.all_reduce(gradient)
found = {"out": out, "input": x.grad, "weight": gradient, "mean": norm.running_mean, "variance": norm.running_var,
         "count": norm.num_batches_tracked, "evaluated": norm.eval()(x)}
save_file({name: value.detach().contiguous() for name, value in found.items()}, f"{folder}/{world}-{rank}")
if world > 1:
    distributed.destroy_process_group()
"""


def test_sync_batch_norm_of_two_processes_equals_one_process_with_all_rows(tmp_path):
    begun = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(world), str(tmp_path)], cwd=ROOT)
        for world in (1, 2)
        for rank in range(world)
    ]
    assert [one.wait(timeout=120) for one in begun] == [0, 0, 0]
    whole, *parts = (load_file(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    for rank, part in enumerate(parts):
        for name in ("out", "input", "evaluated"):
            torch.testing.assert_close(part[name], whole[name][rank::2], rtol=1e-4, atol=1e-4)
        for name in ("weight", "mean", "variance", "count"):
            torch.testing.assert_close(part[name], whole[name], rtol=1e-5, atol=1e-4)
