"""The same weights give the same output as public implementations: `make soak PART=peers` has all, `make test` HF's.

x_BTF in; logits out, or the codes of an encoder where theirs forecasts and ours classifies. The weights of the peer,
drawn at random, are copied name by name.
"""

import pytest
import torch
from torch import nn

import ml_factory.recipes  # noqa: F401 - declares what torchvision may lack, which transformers imports
from ml_factory.models.transformer import ITransformer, ITransformerSpec, PatchTST, PatchTSTSpec

B, T, F, S = 5, 32, 6, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def shaken(module: nn.Module) -> nn.Module:
    """Every parameter away from its start, so that no weight of 1 or bias of 0 hides a mistake."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module.eval()


def load(network: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """All of the network's weights, from the peer's."""
    network.load_state_dict({name: value.detach().clone() for name, value in weights.items()})
    return network.eval()


def copied(names: dict[str, str], theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{our prefix: their prefix} as {our name: their tensor}, for everything below these prefixes."""
    found = {}
    for ours, prefix in names.items():
        for name, value in theirs.items():
            if name == prefix or name.startswith(prefix + "."):
                found[ours + name[len(prefix) :]] = value
    return found


# ---- transformers --------------------------------------------------------------------------------------------------


def hf_patchtst():
    hf = pytest.importorskip("transformers", reason="transformers is not installed: make soak PART=peers")
    config = hf.PatchTSTConfig(
        num_input_channels=F, context_length=T, prediction_length=S, patch_length=8, patch_stride=5, d_model=16,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, norm_type="layernorm", pre_norm=False, scaling="std",
        positional_encoding_type="random", share_embedding=True, share_projection=True, num_targets=3,
        pooling_type="mean", use_cls_token=False,
    )  # fmt: skip
    return shaken(hf.PatchTSTForClassification(config))


def from_hf(theirs: nn.Module) -> dict[str, torch.Tensor]:
    """The encoder's weights by our names."""
    state = theirs.state_dict()
    names = {
        "embed": "model.encoder.embedder.input_embedding",
        "position_ND": "model.encoder.positional_encoder.position_enc",
    }
    for n in range(2):
        layer = f"model.encoder.layers.{n}."
        names |= {
            f"encoder.{n}.attention.out": layer + "self_attn.out_proj",
            f"encoder.{n}.norm1": layer + "norm_sublayer1",
            f"encoder.{n}.norm2": layer + "norm_sublayer3",
            f"encoder.{n}.feed.0": layer + "ff.0",
            f"encoder.{n}.feed.2": layer + "ff.3",
        }
    found = copied(names, state)
    for n in range(2):
        for part in ("weight", "bias"):
            qkv = [state[f"model.encoder.layers.{n}.self_attn.{one}_proj.{part}"] for one in "qkv"]
            found[f"encoder.{n}.attention.qkv.{part}"] = torch.cat(qkv)
    return found


def test_patchtst_classification_equals_transformers_library():
    """Theirs does not show the head what instance norm took out: those columns of ours are 0."""
    theirs = hf_patchtst()
    sizes = {"patch": 8, "stride": 5, "width": 16, "heads": 4, "layers": 2, "inner": 24}
    spec = PatchTSTSpec(**sizes)
    weight, bias = theirs.head.linear.weight, theirs.head.linear.bias
    wide = torch.cat([weight.unflatten(1, (F, 16)), torch.zeros(3, F, 2)], dim=2).flatten(1)
    weights = from_hf(theirs) | {"head.linear.weight": wide, "head.linear.bias": bias}
    x_BTF = 3 * torch.randn(B, T, F) + 20
    with torch.no_grad():
        same(load(PatchTST(F, T, 3, spec), weights)(x_BTF), theirs(past_values=x_BTF).prediction_logits)


# ---- neuralforecast ------------------------------------------------------------------------------------------------

QUIET = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}


def nixtla():
    return pytest.importorskip("neuralforecast.models", reason="neuralforecast is not installed: make soak PART=peers")


def test_itransformer_codes_equal_neuralforecast():
    theirs = shaken(
        nixtla().iTransformer(
            h=S, input_size=T, n_series=F, hidden_size=16, n_heads=4, e_layers=2, d_ff=24, use_norm=True, **QUIET
        )
    )
    state = dict(theirs.state_dict())
    names = {"embed": "enc_embedding.value_embedding", "encoder.2": "encoder.norm"}
    for n in range(2):
        layer = f"encoder.attn_layers.{n}."
        for one in ("conv1", "conv2"):
            state[layer + one + ".weight"] = state[layer + one + ".weight"].squeeze(-1)
        names |= {
            f"encoder.{n}.attention.out": layer + "attention.out_projection",
            f"encoder.{n}.feed.0": layer + "conv1",
            f"encoder.{n}.feed.2": layer + "conv2",
            f"encoder.{n}.norm1": layer + "norm1",
            f"encoder.{n}.norm2": layer + "norm2",
        }
    weights = copied(names, state)
    for n in range(2):
        for part in ("weight", "bias"):
            qkv = [
                state[f"encoder.attn_layers.{n}.attention.{one}_projection.{part}"] for one in ("query", "key", "value")
            ]
            weights[f"encoder.{n}.attention.qkv.{part}"] = torch.cat(qkv)
    ours, codes = ITransformer(F, T, 3, ITransformerSpec(width=16, heads=4, layers=2, inner=24)), {}
    head = {name: value for name, value in ours.state_dict().items() if name.startswith("head.")}
    load(ours, weights | head)
    ours.head_drop.register_forward_pre_hook(lambda _, given: codes.update(ours=given[0]))
    theirs.projector.register_forward_pre_hook(lambda _, given: codes.update(theirs=given[0]))
    x_BTF = 3 * torch.randn(B, T, F) + 20
    with torch.no_grad():
        ours(x_BTF)
        theirs({"insample_y": x_BTF.clone()})
    same(codes["ours"], codes["theirs"])
