"""The same weights give the same output as public implementations: `make soak PART=peers` has all, `make test` HF's.

x_BTF in; logits out, or the codes of an encoder where theirs forecasts and ours classifies. The weights of the peer,
drawn at random, are copied name by name.
"""

import math

import pytest
import torch
from torch import nn

import ml_factory.recipes  # noqa: F401 - torchvision's missing operators, which transformers imports
from ml_factory.models.sequence import LSTM, RecurrentSpec
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


def grn(ours: str, theirs: str, skip: bool = False) -> dict[str, str]:
    """Names of a gated residual network's parts."""
    names = {"outer": "lin_a", "inner": "lin_i", "gate.linear": "glu.lin", "gate.norm": "layer_norm.ln"}
    names |= {"skip": "out_proj"} if skip else {}
    return {f"{ours}.{mine}": f"{theirs}.{other}" for mine, other in names.items()}


def selection(ours: str, theirs: str, state: dict, scale, shift, order: list[int]) -> dict:
    """A variable selection's weights: their networks one by one, `order` their variable's place for each of ours."""
    V, D = scale.shape
    stacked = {
        "outer_VDD": "lin_a.weight", "outer_VD": "lin_a.bias", "inner_VDD": "lin_i.weight", "inner_VD": "lin_i.bias",
        "gate_VGD": "glu.lin.weight", "gate_VG": "glu.lin.bias", "norm_VD": "layer_norm.ln.weight",
        "bias_VD": "layer_norm.ln.bias",
    }  # fmt: skip
    found = {
        f"{ours}.{mine}": torch.stack([state[f"{theirs}.var_grns.{v}.{other}"] for v in order])
        for mine, other in stacked.items()
    }
    found |= {f"{ours}.scale_VD": scale[order], f"{ours}.shift_VD": shift[order]}
    joint = copied(grn(f"{ours}.joint", f"{theirs}.joint_grn", True), state)
    for name in ("outer", "skip"):  # read every variable's embedding
        weight = joint[f"{ours}.joint.{name}.weight"]
        joint[f"{ours}.joint.{name}.weight"] = weight.unflatten(1, (V, D))[:, order].flatten(1)
    gate = [*order, *(V + v for v in order)]  # the answer's order, twice: what passes and how far the gate is open
    for name in ("gate.linear.weight", "gate.linear.bias"):
        joint[f"{ours}.joint.{name}"] = joint[f"{ours}.joint.{name}"][gate]
    for name in ("skip.weight", "skip.bias", "gate.norm.weight", "gate.norm.bias"):
        joint[f"{ours}.joint.{name}"] = joint[f"{ours}.joint.{name}"][order]
    return found | joint


def test_tft_variable_selection_and_gates_equal_neuralforecast():
    """Theirs has known, static and observed inputs; the parts that a classifier of observed ones has are the same."""
    nf, D = nixtla(), 8
    from ml_factory.models.tft import GatedResidualNetwork, VariableSelectionNetwork

    theirs = shaken(
        nf.TFT(h=S, input_size=T, hidden_size=D, n_head=2, hist_exog_list=["a", "b"], futr_exog_list=["c"], **QUIET)
    )
    state, history = dict(theirs.state_dict()), "temporal_encoder.history_vsn"
    scale, shift = (
        torch.cat([state[f"embedding.{key}_embedding_{what}"] for key in ("hist_exog", "futr_exog", "tgt")])
        for what in ("vectors", "bias")
    )
    context = {name for name in state if ".lin_c." in name}
    weights = selection(
        "ours", history, {k: v for k, v in state.items() if k not in context}, scale, shift, [3, 0, 1, 2]
    )
    ours = load(VariableSelectionNetwork(4, D, 0.0), {name[5:]: value for name, value in weights.items()})
    x_BTV = torch.randn(B, T, 4)
    embedded_BTVD = x_BTV[..., [1, 2, 3, 0], None] * scale + shift
    with torch.no_grad():
        chosen_BTD, share_BTV = ours(x_BTV)
        wanted_BTD, wanted_BTV = theirs.temporal_encoder.history_vsn(embedded_BTVD, None)
    same(chosen_BTD, wanted_BTD)
    same(share_BTV, wanted_BTV.squeeze(-1)[..., [3, 0, 1, 2]])
    peer = theirs.temporal_fusion_decoder.positionwise_grn
    feed = load(GatedResidualNetwork(D, D), {k[5:]: v for k, v in copied(grn("ours", "x"), {f"x.{k}": v for k, v in
        peer.state_dict().items()}).items()})  # fmt: skip
    with torch.no_grad():
        same(feed(wanted_BTD), peer(wanted_BTD))


def test_lstm_hidden_states_equal_neuralforecast():
    """Their LSTM decodes its hidden states step by step through an MLP of its own; up to there it is ours."""
    theirs = shaken(nixtla().LSTM(h=S, input_size=T, encoder_hidden_size=8, encoder_n_layers=2, **QUIET))
    ours = LSTM(theirs.hist_encoder.input_size, T, 3, RecurrentSpec(hidden=8, layers=2)).eval()
    ours.rnn.load_state_dict(theirs.hist_encoder.state_dict())
    x_BTF = torch.randn(B, T, theirs.hist_encoder.input_size)
    with torch.no_grad():
        same(ours.rnn(x_BTF)[0], theirs.hist_encoder(x_BTF)[0])


# ---- pytorch-forecasting -------------------------------------------------------------------------------------------


def test_interpretable_attention_equals_pytorch_forecasting():
    """Theirs has a value map for each head by its own name, all of them the same one."""
    parts = pytest.importorskip(
        "pytorch_forecasting.models.temporal_fusion_transformer.sub_modules",
        reason="pytorch-forecasting is not installed: make soak PART=peers",
    )
    from ml_factory.models.tft import InterpretableMultiHeadAttention

    theirs = shaken(parts.InterpretableMultiHeadAttention(n_head=2, d_model=8, dropout=0.0))
    ours = InterpretableMultiHeadAttention(8, 2).eval()
    with torch.no_grad():
        for bias in [*(layer.bias for layer in (*theirs.q_layers, *theirs.k_layers, theirs.v_layer))]:
            bias.zero_()
        ours.query.weight.copy_(torch.cat([layer.weight for layer in theirs.q_layers]))
        ours.key.weight.copy_(torch.cat([layer.weight for layer in theirs.k_layers]))
        ours.value.weight.copy_(theirs.v_layer.weight)
        ours.out.weight.copy_(theirs.w_h.weight)
        x_BTD = torch.randn(B, T, 8)
        y_B1D, share_B1HT = theirs(q=x_BTD[:, -1:], k=x_BTD, v=x_BTD)
        mixed_BD, attention_BT = ours(x_BTD)
    same(mixed_BD, y_B1D[:, 0])
    same(attention_BT, share_B1HT.mean(dim=2)[:, 0])
    assert math.isclose(float(attention_BT.sum()), B, rel_tol=1e-5)
