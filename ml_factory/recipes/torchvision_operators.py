"""torchvision with torch's build for CPUs, where the package index has only torchvision's build for CUDA.

That build's compiled operators cannot be loaded there, and torchvision (with it transformers) then fails on import: it
registers shapes for undeclared operators. Networks need none of them.
"""

import importlib
import importlib.metadata
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_declared: list[Any] = []  # the library of the declarations, which end with it


def declare_missing_operators() -> None:
    """Declare the operators of torchvision that its import wants, where its own declarations cannot be loaded."""
    if _declared or not _has_cuda_build_with_cpu_torch():
        return
    torch = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        library.define(f"{name}{_SCHEMA}")
    _declared.append(library)


def _has_cuda_build_with_cpu_torch() -> bool:
    try:
        torch, vision = (importlib.metadata.version(name) for name in ("torch", "torchvision"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return torch.endswith("+cpu") and not vision.endswith("+cpu")
