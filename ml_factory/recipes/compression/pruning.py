"""Pruning: single weights set to zero, and whole heads and inner units removed."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def prune_by_magnitude(network: nn.Module, share: float) -> dict[str, Tensor]:
    """Set this share of the weights of all linear maps, convolutions and recurrent layers to zero, the smallest of
    all; in training they stay zero, since their gradient is zero too.

    Embeddings, biases and norms are left alone. Returns the masks of what is kept, by name.
    """
    tied = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    kinds = (nn.Linear, nn.RNNBase, nn.modules.conv._ConvNd)
    weights = {
        f"{name}.{own}" if name else own: weight
        for name, module in network.named_modules() if isinstance(module, kinds)
        for own, weight in module.named_parameters(recurse=False) if weight.ndim > 1 and id(weight) not in tied
    }  # fmt: skip
    sizes = torch.cat([weight.detach().abs().flatten() for weight in weights.values()])
    count = round(share * len(sizes))
    border = sizes.kthvalue(count).values if count else sizes.new_tensor(-1.0)
    masks = {}
    for name, weight in weights.items():
        masks[name] = (weight.detach().abs() > border).to(weight.dtype)
        with torch.no_grad():
            weight.mul_(masks[name])
        weight.register_hook(_masked(masks[name]))
    return masks


def _masked(mask: Tensor):
    return lambda gradient: gradient * mask.to(gradient.device)


def share_of_zeros(network: nn.Module) -> float:
    """Return the share of parameters that are exactly zero."""
    counts = [(int((one == 0).sum()), one.numel()) for one in network.parameters()]
    return sum(zeros for zeros, _ in counts) / sum(size for _, size in counts)


def kept_count(whole: int, share: float) -> int:
    """Return how many of so many parts are kept when this share is removed: at least one."""
    return max(round(whole * (1 - share)), 1)


def largest(importance: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest, ascending."""
    return importance.topk(count).indices.sort().values


def prune_t5_state(
    state: Mapping[str, Tensor], heads: int, width: int, keep_heads: int, keep_inner: int
) -> dict[str, Tensor]:
    """Return the weights of a T5 with fewer heads and inner units, the most important of each.

    A head counts as the norms of what it reads and writes. Layers of a stack share their table of relative positions,
    which has a column a head: their self-attention loses the same heads. width : of a head.
    """
    kept = dict(state)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in state:
        if name.endswith("Attention.o.weight"):
            layer = name.removesuffix("o.weight")
            stack = name.partition(".block.")[0]
            # Attention to the encoder's text has no such table: each layer chooses for itself.
            groups.setdefault((stack, layer if "EncDec" in layer else ""), []).append(layer)
    for layers in groups.values():
        scores = sum(_head_importance(state, layer, heads, width) for layer in layers)
        chosen = largest(scores, keep_heads)
        rows = (chosen[:, None] * width + torch.arange(width)).flatten()
        for layer in layers:
            for own in "qkv":
                kept[f"{layer}{own}.weight"] = state[f"{layer}{own}.weight"][rows]
            kept[f"{layer}o.weight"] = state[f"{layer}o.weight"][:, rows]
            table = f"{layer}relative_attention_bias.weight"
            if table in state:
                kept[table] = state[table][:, chosen]
    for name in state:
        if name.endswith("wo.weight"):
            layer = name.removesuffix("wo.weight")
            readers = [one for one in ("wi", "wi_0", "wi_1") if f"{layer}{one}.weight" in state]
            scores = state[name].norm(dim=0)
            for one in readers:
                scores = scores * state[f"{layer}{one}.weight"].norm(dim=1)
            chosen = largest(scores, keep_inner)
            kept[name] = state[name][:, chosen]
            for one in readers:
                kept[f"{layer}{one}.weight"] = state[f"{layer}{one}.weight"][chosen]
    return kept


def _head_importance(state: Mapping[str, Tensor], layer: str, heads: int, width: int) -> Tensor:
    value, out = state[f"{layer}v.weight"], state[f"{layer}o.weight"]
    return value.view(heads, width, -1).flatten(1).norm(dim=1) * out.view(len(out), heads, width).norm(dim=(0, 2))


def prune_encoder_state(state: Mapping[str, Tensor], keep: int) -> dict[str, Tensor]:
    """Return the weights of a transformer with so many inner units in each feed-forward part."""
    kept = dict(state)
    for name in state:
        if name.endswith("feed.0.weight"):
            layer = name.removesuffix("0.weight")
            chosen = largest(state[name].norm(dim=1) * state[f"{layer}2.weight"].norm(dim=0), keep)
            kept[name], kept[f"{layer}0.bias"] = state[name][chosen], state[f"{layer}0.bias"][chosen]
            kept[f"{layer}2.weight"] = state[f"{layer}2.weight"][:, chosen]
    return kept


def prune_recurrent_state(state: Mapping[str, Tensor], hidden: int, keep: int) -> dict[str, Tensor]:
    """Return the weights of a recurrent network of `models.sequence` with so many hidden units in every layer."""
    readers = [value for name, value in state.items() if name.startswith("head") and value.shape[-1] == hidden]
    recurrent = [value for name, value in state.items() if ".weight_hh" in name]
    scores = sum(value.norm(dim=0) for value in [*recurrent, *readers])
    chosen = largest(scores, keep)
    kept = {}
    for name, value in state.items():
        if name.startswith("rnn."):
            rows = (torch.arange(len(value) // hidden)[:, None] * hidden + chosen).flatten()
            value = value[rows]
            if ".weight_hh" in name or (".weight_ih" in name and not name.endswith("_l0")):
                value = value[:, chosen]
        elif name.startswith("head") and value.ndim > 1 and value.shape[-1] == hidden:
            value = value[:, chosen]
        kept[name] = value
    return kept


def load_sliced(network: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load these weights into a network of their shapes."""
    network.load_state_dict({name: value.detach().clone() for name, value in state.items()})
    return network
