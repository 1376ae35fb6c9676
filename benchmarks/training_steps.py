"""A training step of each network compared with public implementations of the same size, eager, fp32, interleaved.

    make bench BENCH=training       # with everything else that is measured of trainings
    .venv-peers/bin/python -m benchmarks.training_steps --only patchtst --threads 2

L = 96 steps of 32 channels, width 128, one step ahead: a head as small as a classifier's. A step is forward, mean
squared error, backward and torch's fused AdamW, the same for all. Weights and inputs are made up: what is learnt is
compared elsewhere (tests/models/test_peers.py states that the same weights give the same outputs).
"""

import argparse
import importlib
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.measure import digits, in_turns, median_ratio, median_wall, print_json
from ml_factory.models.heads import ForecastTask
from ml_factory.models.sequence import LSTM, TCN, RecurrentSpec, TCNSpec
from ml_factory.models.tft import TFT, TFTSpec
from ml_factory.models.transformer import ITransformer, ITransformerSpec, PatchTST, PatchTSTSpec
from ml_factory.training.precision import native_precision

T, F, D = 96, 32, 128
HEADS, LAYERS, INNER = 16, 3, 256  # of PatchTST, as neuralforecast has them; iTransformer has 2 layers of 8 heads
ONE, ALL = ForecastTask(1, channels=1), ForecastTask(1)
QUIET = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
RATIOS = {"ratio": "wall", "cpu_ratio": "cpu"}
IN_BF16 = "ours, bf16"
WANTED = {"lstm": 0.98, "tcn": 0.98, "patchtst": 1.5, "itransformer": 1.15, "tft": 2.0}


@dataclass(frozen=True)
class Side:
    """A network, and how it is called for a forecast of this batch."""

    network: nn.Module
    forward: Callable[[], Tensor]


def compared(ours: nn.Module, x_BTF: Tensor) -> Side:
    return Side(ours, lambda: ours(x_BTF))


def of_one_series(theirs: nn.Module, x_BTF: Tensor, history: int = F - 1) -> Side:
    """neuralforecast's: the first channel is the series, the others are what else is known of the past."""
    y_BT1, seen_BTX = x_BTF[:, :, :1].contiguous(), x_BTF[:, :, 1 : 1 + history].contiguous()
    batch = {"insample_y": y_BT1, "hist_exog": seen_BTX, "futr_exog": None, "stat_exog": None}
    return Side(theirs, lambda: theirs(batch))


def lstm(nf, x_BTF: Tensor, dropout: float) -> dict[str, Side]:
    spec = RecurrentSpec(hidden=D, layers=2, dropout=dropout)
    sizes = {"encoder_hidden_size": D, "encoder_n_layers": 2, "encoder_dropout": dropout}
    theirs = nf.LSTM(h=1, input_size=T, hist_exog_list=named(F - 1), **sizes, **QUIET)
    return {"ours": compared(LSTM(F, T, ONE, spec), x_BTF), "neuralforecast": of_one_series(theirs, x_BTF)}


def tcn(nf, x_BTF: Tensor, dropout: float) -> dict[str, Side]:
    """Ours has two convolutions a level, so theirs gets each dilation twice; it drops nothing out."""
    dilations = [2**level for level in range(5) for _ in range(2)]
    sizes = {"kernel_size": 3, "dilations": dilations, "encoder_hidden_size": D}
    theirs = nf.TCN(h=1, input_size=T, hist_exog_list=named(F - 1), **sizes, **QUIET)
    ours = TCN(F, T, ONE, TCNSpec(width=D, kernel=3, levels=5, dropout=dropout))
    return {"ours": compared(ours, x_BTF), "neuralforecast": of_one_series(theirs, x_BTF)}


def patchtst(nf, x_BTF: Tensor, dropout: float) -> dict[str, Side]:
    """neuralforecast's reads single series, so each channel is one; with its attention scores handed on from layer to
    layer, which is its default, and without, which is ours."""
    spec = PatchTSTSpec(width=D, heads=HEADS, layers=LAYERS, inner=INNER, dropout=dropout, pad=True)
    sizes = {"hidden_size": D, "n_heads": HEADS, "encoder_layers": LAYERS, "linear_hidden_size": INNER}
    drops = {"dropout": dropout, "fc_dropout": dropout, "head_dropout": dropout}
    x_MT1 = x_BTF.transpose(1, 2).reshape(-1, T, 1).contiguous()
    sides = {"ours": compared(PatchTST(F, T, ALL, spec), x_BTF)}
    for name, handed_on in (("neuralforecast", True), ("neuralforecast, plain attention", False)):
        theirs = nf.PatchTST(h=1, input_size=T, res_attention=handed_on, **sizes, **drops, **QUIET)
        sides[name] = of_one_series(theirs, x_MT1, 0)
    return sides


def patchtst_of_transformers(nf, x_BTF: Tensor, dropout: float) -> dict[str, Side]:
    """Without the padded patch and with batch norm, as theirs has them."""
    hf = importlib.import_module("transformers")
    spec = PatchTSTSpec(width=D, heads=HEADS, layers=LAYERS, inner=INNER, dropout=dropout, norm="batch")
    config = hf.PatchTSTConfig(
        num_input_channels=F, context_length=T, prediction_length=1, patch_length=16, patch_stride=8, d_model=D,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=INNER, pre_norm=False, scaling="std",
        ff_dropout=dropout, head_dropout=dropout, positional_dropout=dropout, use_cls_token=False,
    )  # fmt: skip
    theirs = hf.PatchTSTForPrediction(config)
    return {
        "ours": compared(PatchTST(F, T, ALL, spec), x_BTF),
        "transformers": Side(theirs, lambda: theirs(past_values=x_BTF).prediction_outputs),
    }


def itransformer(nf, x_BTF: Tensor, dropout: float) -> dict[str, Side]:
    spec = ITransformerSpec(width=D, heads=8, layers=2, inner=INNER, dropout=dropout)
    sizes = {"hidden_size": D, "n_heads": 8, "e_layers": 2, "d_ff": INNER, "dropout": dropout}
    theirs = nf.iTransformer(h=1, input_size=T, n_series=F, **sizes, **QUIET)
    return {
        "ours": compared(ITransformer(F, T, ALL, spec), x_BTF),
        "neuralforecast": Side(theirs, lambda: theirs({"insample_y": x_BTF})),
    }


def tft(nf, x_BTF: Tensor, dropout: float) -> dict[str, Side]:
    """Theirs repeats the series as what is known of the future: with it and the series 32 variables."""
    spec = TFTSpec(width=D, heads=4, dropout=dropout, each_dropout=dropout)
    theirs = nf.TFT(
        h=1, input_size=T, hidden_size=D, n_head=4, dropout=dropout, hist_exog_list=named(F - 2), **QUIET
    )  # fmt: skip
    return {"ours": compared(TFT(F, T, ONE, spec), x_BTF), "neuralforecast": of_one_series(theirs, x_BTF, F - 2)}


# name -> (how its sides are made, rows of a batch)
NETWORKS = {
    "lstm": (lstm, 128),
    "tcn": (tcn, 64),
    "patchtst": (patchtst, 16),
    "patchtst, batch norm": (patchtst_of_transformers, 16),
    "itransformer": (itransformer, 64),
    "tft": (tft, 16),
}


def named(count: int) -> list[str]:
    return [f"x{number}" for number in range(count)]


def stepping(side: Side) -> Callable[[], None]:
    """One step of it."""
    side.network.train()
    target = torch.zeros_like(side.forward().detach())
    optimizer = torch.optim.AdamW(side.network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(side.forward(), target).backward()
        optimizer.step()

    return step


def compare(name: str, nf, dropout: float, threads: int, repeats: int) -> None:
    """A line a side; the ratio is the peer's time over ours, its median over the rounds."""
    torch.manual_seed(0)
    make, batch = NETWORKS[name]
    sides = make(nf, torch.randn(batch, T, F), dropout)
    if native_precision("cpu") == "bf16":
        sides[IN_BF16] = halved(make(nf, torch.randn(batch, T, F), dropout)["ours"])
    steps = {side: stepping(one) for side, one in sides.items()}
    in_turns(steps, 1)
    runs = in_turns(steps, repeats)
    for side, taken in runs.items():
        seconds = median_wall(taken)
        wanted = "<= 1: never slower than its own fp32" if side == IN_BF16 else f">= {WANTED[name.split(',')[0]]}"
        ratios = {name: digits(median_ratio(taken, runs["ours"], clock), 3) for name, clock in RATIOS.items()}
        print_json(
            bench="training", part="step", network=name, side=side, dropout=dropout, batch=batch, threads=threads,
            parameters=sum(p.numel() for p in sides[side].network.parameters() if p.requires_grad),
            median_wall_s=digits(seconds), samples_per_s=digits(batch / seconds),
            **(ratios | {"wanted": wanted} if side != "ours" else {}),
        )  # fmt: skip


def halved(side: Side) -> Side:
    """Its forward pass by autocast in bf16, weights and moments in fp32."""

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return side.forward().float()

    return Side(side.network, forward)


def in_bf16() -> None:
    """Report why there is no comparison in bf16 on a CPU without AMX."""
    amx = torch.cpu._is_amx_tile_supported()
    print_json(
        bench="training", part="bf16", chosen=native_precision("cpu"), amx=amx,
        not_run="" if amx else "this CPU has no AMX: bf16 would be emulated, and precision='auto' takes fp32",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--dropouts", nargs="+", type=float, default=[0.0, 0.1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # theirs, not ours
    logging.disable(logging.WARNING)
    torch.set_num_threads(args.threads)
    nf = importlib.import_module("neuralforecast.models")
    for name in args.only:
        for dropout in args.dropouts:
            compare(name, nf, dropout, args.threads, args.repeats)
    in_bf16()


if __name__ == "__main__":
    main()
