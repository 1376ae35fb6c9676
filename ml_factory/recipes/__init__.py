"""Trainings of other fields on the same loop: each adds data, a network, a loss and its results."""

import importlib
import importlib.metadata
import logging
from typing import Any


def _missing_operators() -> Any:
    """Declare torchvision's operators for a CPU build of torch; the declarations live as long as the returned library.

    Package indexes have torchvision for CUDA, whose compiled operators that torch cannot load, and the import of
    torchvision (with it transformers) fails at undeclared operators. Networks need none of them.
    """
    try:
        torch, vision = (importlib.metadata.version(name) for name in ("torch", "torchvision"))
    except importlib.metadata.PackageNotFoundError:
        return None
    if "+cpu" not in torch or "+cpu" in vision:
        return None
    library = importlib.import_module("torch").library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_operators = _missing_operators()  # before any file here, or transformers, imports torchvision
# transformers imports torchao, which names each CUDA file that it does not load and makes torch warn of its types.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
