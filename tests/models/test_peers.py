"""The same weights give the same output as public implementations: `make soak PART=peers` has all, `make test` HF's.

x_BTF in, y_BSC out. The weights of the peer, drawn at random, are copied name by name.
"""

import math

import pytest
import torch
from torch import nn

from ml_factory.models.heads import ForecastTask
from ml_factory.models.sequence import LSTM, RecurrentSpec
from ml_factory.models.tft import TFT, TFTSpec
from ml_factory.models.transformer import ITransformer, ITransformerSpec, PatchTST, PatchTSTSpec
from ml_factory.recipes.torchvision_operators import declare_missing_operators

B, T, F, S = 5, 32, 6, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours


@pytest.fixture(autouse=True)
def one_seed():
    torch.manual_seed(0)


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def shaken(module: nn.Module) -> nn.Module:
    """Every parameter away from its start, so that no weight of 1 or bias of 0 hides a mistake; statistics too."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for name, value in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value += torch.rand_like(value)
    return module.eval()


def load(network: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """All of the network's weights, from the peer's."""
    own = network.state_dict()
    own |= {name: value for name, value in own.items() if name.endswith("num_batches_tracked")}
    given = {name: value.detach().clone() for name, value in weights.items()}
    assert {name for name in own if not name.endswith("num_batches_tracked")} == set(given)
    network.load_state_dict(own | given)
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


def hf_patchtst(kind: str, norm: str):
    hf = pytest.importorskip("transformers", reason="transformers is not installed: make soak PART=peers")
    declare_missing_operators()  # transformers imports torchvision
    config = hf.PatchTSTConfig(
        num_input_channels=F, context_length=T, prediction_length=S, patch_length=8, patch_stride=5, d_model=16,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, norm_type=norm, pre_norm=False, scaling="std",
        positional_encoding_type="random", share_embedding=True, share_projection=True, num_targets=3,
        pooling_type="mean" if kind == "PatchTSTForClassification" else None, use_cls_token=False,
    )  # fmt: skip
    return shaken(getattr(hf, kind)(config))


def from_hf(theirs: nn.Module, norm: str) -> dict[str, torch.Tensor]:
    """The encoder's weights by our names."""
    state = theirs.state_dict()
    names = {
        "embed": "model.encoder.embedder.input_embedding",
        "position_ND": "model.encoder.positional_encoder.position_enc",
    }
    inner = ".batchnorm" if norm == "batch" else ""
    for n in range(2):
        layer = f"model.encoder.layers.{n}."
        names |= {
            f"encoder.{n}.attention.out": layer + "self_attn.out_proj",
            f"encoder.{n}.norm1": layer + "norm_sublayer1" + inner,
            f"encoder.{n}.norm2": layer + "norm_sublayer3" + inner,
            f"encoder.{n}.feed.0": layer + "ff.0",
            f"encoder.{n}.feed.2": layer + "ff.3",
        }
    found = copied(names, state)
    for n in range(2):
        for part in ("weight", "bias"):
            qkv = [state[f"model.encoder.layers.{n}.self_attn.{one}_proj.{part}"] for one in "qkv"]
            found[f"encoder.{n}.attention.qkv.{part}"] = torch.cat(qkv)
    return {name: value for name, value in found.items() if not name.endswith("num_batches_tracked")}


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_patchtst_forecast_equals_transformers_library(norm):
    theirs = hf_patchtst("PatchTSTForPrediction", norm + "norm")
    spec = PatchTSTSpec(patch=8, stride=5, width=16, heads=4, layers=2, inner=24, norm=norm)
    weights = from_hf(theirs, norm) | copied({"head.linear": "head.projection"}, theirs.state_dict())
    ours = load(PatchTST(F, T, ForecastTask(S), spec), weights)
    x_BTF = 3 * torch.randn(B, T, F) + 20
    with torch.no_grad():
        same(ours(x_BTF), theirs(past_values=x_BTF).prediction_outputs)


def test_patchtst_classification_equals_transformers_library():
    """Theirs does not show the head what instance norm took out: those columns of ours are 0."""
    theirs = hf_patchtst("PatchTSTForClassification", "layernorm")
    sizes = {"patch": 8, "stride": 5, "width": 16, "heads": 4, "layers": 2, "inner": 24}
    spec = PatchTSTSpec(**sizes)
    weight, bias = theirs.head.linear.weight, theirs.head.linear.bias
    wide = torch.cat([weight.unflatten(1, (F, 16)), torch.zeros(3, F, 2)], dim=2).flatten(1)
    weights = from_hf(theirs, "layer") | {"head.linear.weight": wide, "head.linear.bias": bias}
    x_BTF = 3 * torch.randn(B, T, F) + 20
    with torch.no_grad():
        same(load(PatchTST(F, T, 3, spec), weights)(x_BTF), theirs(past_values=x_BTF).prediction_logits)


# ---- neuralforecast ------------------------------------------------------------------------------------------------

QUIET = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}


def nixtla():
    return pytest.importorskip("neuralforecast.models", reason="neuralforecast is not installed: make soak PART=peers")


def test_itransformer_forecast_equals_neuralforecast():
    theirs = shaken(
        nixtla().iTransformer(
            h=S, input_size=T, n_series=F, hidden_size=16, n_heads=4, e_layers=2, d_ff=24, use_norm=True, **QUIET
        )
    )
    state = dict(theirs.state_dict())
    names = {"embed": "enc_embedding.value_embedding", "encoder.2": "encoder.norm", "head.linear": "projector"}
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
    ours = load(ITransformer(F, T, ForecastTask(S), ITransformerSpec(width=16, heads=4, layers=2, inner=24)), weights)
    x_BTF = 3 * torch.randn(B, T, F) + 20
    with torch.no_grad():
        same(ours(x_BTF), theirs({"insample_y": x_BTF.clone()}))


def grn(ours: str, theirs: str, skip: bool = False, context: bool = False) -> dict[str, str]:
    """Names of a gated residual network's parts."""
    names = {"outer": "lin_a", "inner": "lin_i", "gate.linear": "glu.lin", "gate.norm": "layer_norm.ln"}
    names |= ({"skip": "out_proj"} if skip else {}) | ({"context": "lin_c"} if context else {})
    return {f"{ours}.{mine}": f"{theirs}.{other}" for mine, other in names.items()}


def selection(ours: str, theirs: str, state: dict, scale, shift, order: list[int], context: bool) -> dict:
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
    joint = copied(grn(f"{ours}.joint", f"{theirs}.joint_grn", True, context), state)
    for name in ("outer", "skip"):  # read every variable's embedding
        weight = joint[f"{ours}.joint.{name}.weight"]
        joint[f"{ours}.joint.{name}.weight"] = weight.unflatten(1, (V, D))[:, order].flatten(1)
    gate = [*order, *(V + v for v in order)]  # the answer's order, twice: what passes and how far the gate is open
    for name in ("gate.linear.weight", "gate.linear.bias"):
        joint[f"{ours}.joint.{name}"] = joint[f"{ours}.joint.{name}"][gate]
    for name in ("skip.weight", "skip.bias", "gate.norm.weight", "gate.norm.bias"):
        joint[f"{ours}.joint.{name}"] = joint[f"{ours}.joint.{name}"][order]
    return found | joint


@pytest.mark.parametrize("layers", [1, 2])
def test_tft_forecast_equals_neuralforecast(layers):
    """One target, two observed variables, two known ahead, three static ones, three quantiles."""
    nf, D, H = nixtla(), 8, 2
    from neuralforecast.losses.pytorch import MQLoss

    theirs = shaken(
        nf.TFT(
            h=S, input_size=T, hidden_size=D, n_head=H, n_rnn_layers=layers, stat_exog_list=["a", "b", "c"],
            hist_exog_list=["d", "e"], futr_exog_list=["f", "g"], loss=MQLoss(quantiles=[0.1, 0.5, 0.9]), **QUIET,
        )
    )  # fmt: skip
    state = dict(theirs.state_dict())
    parts = {
        name: (state[f"embedding.{key}_embedding_vectors"], state[f"embedding.{key}_embedding_bias"])
        for name, key in {"static": "stat_exog", "known": "futr_exog", "seen": "hist_exog", "target": "tgt"}.items()
    }
    past = [torch.cat([parts[name][k] for name in ("seen", "known", "target")]) for k in range(2)]
    coder, fusion = "temporal_encoder.", "temporal_fusion_decoder."
    weights = selection("past", coder + "history_vsn", state, *past, [4, 0, 1, 2, 3], True)
    weights |= selection("future", coder + "future_vsn", state, *parts["known"], [0, 1], True)
    weights |= selection("static", "static_encoder.vsn", state, *parts["static"], [0, 1, 2], False)
    names = {
        "encoder": coder + "history_encoder", "decoder": coder + "future_encoder",
        "local.linear": coder + "input_gate.lin", "local.norm": coder + "input_gate_ln",
        "attention.out": fusion + "attention.out_proj", "attended.linear": fusion + "attention_gate.lin",
        "attended.norm": fusion + "attention_ln", "decoded.linear": fusion + "decoder_gate.lin",
        "decoded.norm": fusion + "decoder_ln", "head": "output_adapter",
        **grn("enrich", fusion + "enrichment_grn", context=True), **grn("feed", fusion + "positionwise_grn"),
    }  # fmt: skip
    for n in range(2 + 2 * layers):
        names |= grn(f"contexts.{n}", f"static_encoder.context_grns.{n}")
    weights |= copied(names, state)
    qkv = state[fusion + "attention.qkv_linears.weight"].split((D, D, D // H))
    weights |= {f"attention.{name}.weight": part for name, part in zip(("query", "key", "value"), qkv, strict=True)}
    spec = TFTSpec(width=D, heads=H, layers=layers, known=("k0", "k1"), static=("s0", "s1", "s2"))
    ours = load(TFT(5, T, ForecastTask(S, channels=1, quantiles=(0.1, 0.5, 0.9)), spec), weights)

    target, seen = torch.randn(B, T, 1), torch.randn(B, T, 2)
    known, static = torch.randn(B, T + S, 2), torch.randn(B, 3)
    batch = {"insample_y": target, "hist_exog": seen, "futr_exog": known, "stat_exog": static}
    with torch.no_grad():
        y_BSCQ = ours(torch.cat([target, seen, known[:, :T]], dim=2), known[:, T:], static)
        same(y_BSCQ[:, :, 0], theirs(batch))
        reported = ours.explain(torch.cat([target, seen, known[:, :T]], dim=2), known[:, T:], static)
    shares = theirs.interpretability_params
    same(reported.past_BTF, shares["history_vsn_wgts"][..., [4, 0, 1, 2, 3]])
    same(reported.future_BSK, shares["future_vsn_wgts"])
    same(reported.static_BV, shares["static_encoder_sparse_weights"])
    same(reported.attention_BSU, shares["attn_wts"].mean(1)[:, T:])


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
    from ml_factory.models.tft_layers import InterpretableMultiHeadAttention

    theirs = shaken(parts.InterpretableMultiHeadAttention(n_head=2, d_model=8, dropout=0.0))
    ours = InterpretableMultiHeadAttention(8, 2, positions=T + S, asking=S).eval()
    with torch.no_grad():
        for bias in [*(layer.bias for layer in (*theirs.q_layers, *theirs.k_layers, theirs.v_layer))]:
            bias.zero_()
        ours.query.weight.copy_(torch.cat([layer.weight for layer in theirs.q_layers]))
        ours.key.weight.copy_(torch.cat([layer.weight for layer in theirs.k_layers]))
        ours.value.weight.copy_(theirs.v_layer.weight)
        ours.out.weight.copy_(theirs.w_h.weight)
        x_BUD = torch.randn(B, T + S, 8)
        later = torch.ones(S, T + S).triu(T + 1).bool()[None].expand(B, -1, -1)
        y, shares = theirs(q=x_BUD[:, T:], k=x_BUD, v=x_BUD, mask=later)
        mixed, attention = ours(x_BUD)
    same(mixed, y)
    same(attention, shares.mean(dim=2))
    assert math.isclose(float(attention.sum()), B * S, rel_tol=1e-5)
