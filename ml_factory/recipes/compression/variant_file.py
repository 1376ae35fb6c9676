"""File of a compressed network: plain tensors of our own format, with int8 weights and their scales as such.

O rows of a weight, each with a scale of its own.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ml_factory.errors import CheckpointError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.serialization import read_state_file, write_state_file

quantization = LazyModule("torchao.quantization")

FORMAT = "ml_factory.compressed/1"
INT8 = ("int8_dynamic", "int8_weights")
_SMALL = 1024  # numbers of a weight that stays float32
_PARTS = ("qdata", "scale", "zero_point")  # of torchao's int8 tensors

Architecture = Mapping[str, Any]
Build = Callable[[Architecture], nn.Module]


@dataclass(frozen=True)
class Variant:
    """A compressed network.

    architecture : what its network is built from. int8 : "", int8_dynamic or int8_weights.
    """

    method: str
    network: nn.Module
    architecture: Architecture
    int8: str = ""


def quantize(network: nn.Module, kind: str) -> list[str]:
    """Give the linear maps int8 weights in place, a scale a row, computed by torchao; return their names.

    kind : int8_weights computes in float32 from them; int8_dynamic rounds its inputs to int8 too. An output that is
    tied to the embedding stays as it is.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it names each CUDA file that it does not load
    tied = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    chosen = [name for name, module in network.named_modules()
              if isinstance(module, nn.Linear) and id(module.weight) not in tied]  # fmt: skip
    for name in chosen:
        network.get_submodule(name).__class__ = nn.Linear  # oneDNN's product reads plain float32 only
    config = {"int8_dynamic": "Int8DynamicActivationInt8WeightConfig", "int8_weights": "Int8WeightOnlyConfig"}[kind]
    wanted = set(chosen)
    quantization.quantize_(network, getattr(quantization, config)(), lambda module, name: name in wanted)
    return [f"{name}.weight" for name in chosen]


def save_variant(path: Path, subject: str, variant: Variant) -> int:
    """Write a variant; return the size of the file in bytes."""
    write_state_file(path, {
        "format": FORMAT, "subject": subject, "method": variant.method, "int8": variant.int8,
        "architecture": dict(variant.architecture), "weights": _stored(variant),
    })  # fmt: skip
    return path.stat().st_size


def _stored(variant: Variant) -> dict[str, Tensor]:
    """Return each weight once, with int8 ones as numbers and scales."""
    quantized = set(quantize(variant.network, variant.int8)) if variant.int8 else set()
    own, found = variant.network.state_dict(keep_vars=True), {}
    seen: set[int] = set()
    for name, value in own.items():
        if id(value) in seen:  # tied to an earlier one
            continue
        seen.add(id(value))
        value = value.detach()
        if name in quantized:
            found |= {f"{name}#{part}": getattr(value, part).cpu().clone() for part in _PARTS}
        elif variant.int8 == "int8_weights" and value.ndim > 1 and value.numel() >= _SMALL:
            scale = value.flatten(1).abs().amax(1).clamp_min(1e-12) / 127
            shape = (-1, *[1] * (value.ndim - 1))
            found[f"{name}#int8"] = (value / scale.view(shape)).round().clamp(-127, 127).to(torch.int8).cpu()
            found[f"{name}#rows"] = scale.cpu()
        else:
            found[name] = value.cpu().clone()
    return found


def load_variant(path: Path, subject: str, build: Build) -> Variant:
    """Read a variant of this subject. Raises CheckpointError for a damaged file, SettingsError for another's."""
    state = read_state_file(path)
    if state.get("format") != FORMAT or state.get("subject") != subject:
        raise SettingsError("This is no compressed network of this model", where=path, got=state.get("subject", "none"),
                            wanted=subject)  # fmt: skip
    try:
        int8, stored = state["int8"], dict(state["weights"])
        network = build(state["architecture"]).eval()
        quantized = quantize(network, int8) if int8 else []
        for name in quantized:
            weight = network.get_parameter(name)
            for part in _PARTS:
                _fill(getattr(weight, part), stored.pop(f"{name}#{part}"), name)
        for name in [one.removesuffix("#int8") for one in stored if one.endswith("#int8")]:
            value, scale = stored.pop(f"{name}#int8"), stored.pop(f"{name}#rows")
            stored[name] = value.float() * scale.view(-1, *[1] * (value.ndim - 1))
        own = network.state_dict()
        for name, value in stored.items():
            _fill(own[name], value, name)
        variant = Variant(str(state["method"]), network, dict(state["architecture"]), str(int8))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError("This compressed network is damaged", where=path, got=repr(error)[:200],
                              next_step="delete it and run recipe compress again") from error  # fmt: skip
    return variant


def _fill(target: Tensor, value: Tensor, name: str) -> None:
    if target.shape != value.shape or target.dtype != value.dtype:
        raise ValueError(f"{name}: {tuple(value.shape)} {value.dtype}, not {tuple(target.shape)} {target.dtype}")
    with torch.no_grad():
        target.copy_(value)
