"""Temporal fusion transformer (Lim et al. 2021) with observed inputs alone, as a classifier.

B batch, T steps of the window, F features, D width, C classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.models import recurrent_layers
from ml_factory.models.base import check_settings
from ml_factory.models.tft_layers import (
    GateAddNorm,
    GatedResidualNetwork,
    InterpretableMultiHeadAttention,
    VariableSelectionNetwork,
)


@dataclass(frozen=True)
class TFTSpec:
    """width : of everything.
    layers : of the LSTM.
    dropout : inside gated networks and before gates.

    each_dropout : inside each variable's own network; with 170 variables it is most of the training's time, so 0.
    """

    width: int = 16
    heads: int = 2
    layers: int = 1
    dropout: float = 0.1
    each_dropout: float = 0.0

    def __post_init__(self):
        some, share = "[1, inf)", "[0, 1)"
        check_settings(self, width=some, heads=some, layers=some, dropout=share, each_dropout=share)
        if self.width % self.heads:
            raise SettingsError(
                "Cannot build a TFT", where="heads", got=self.heads, wanted=f"a divisor of {self.width}"
            )


@dataclass(frozen=True)
class TFTExplanation:
    """Explanation of a TFT. Both sum to 1 over the last axis.

    shares_BTF : share of each variable in what is selected at each step.
    attention_BT : of the answer, over the window's steps.
    """

    shares_BTF: Tensor
    attention_BT: Tensor


class TFT(nn.Module):
    """x_BTF -> logits_BC, at the window's last step."""

    Spec = TFTSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: TFTSpec):
        super().__init__()
        D = spec.width
        self.past = VariableSelectionNetwork(features, D, spec.dropout, spec.each_dropout)
        self.encoder = recurrent_layers.LSTMLayer(D, D, spec.layers, spec.dropout)
        self.drop = nn.Dropout(spec.dropout)
        self.local = GateAddNorm(D, D)
        self.enrich = GatedResidualNetwork(D, D, dropout=spec.dropout)
        self.attention = InterpretableMultiHeadAttention(D, spec.heads)
        self.attended = GateAddNorm(D, D)
        self.feed = GatedResidualNetwork(D, D, dropout=spec.dropout)
        self.decoded = GateAddNorm(D, D)
        self.head = nn.Linear(D, classes)

    def forward(self, x_BTF: Tensor) -> Tensor:
        return self.head(self._decode(x_BTF)[0])

    @torch.no_grad()
    def explain(self, x_BTF: Tensor) -> TFTExplanation:
        """Return variable shares and attention for these inputs."""
        return self._decode(x_BTF)[1]

    def _decode(self, x_BTF: Tensor) -> tuple[Tensor, TFTExplanation]:
        # ---------------------------------------------------------------- select variables, step by step (4.2)
        chosen_BTD, shares_BTF = self.past(x_BTF)
        # ---------------------------------------------------------------- local order, then what is far (4.5)
        local_BTD, _ = self.encoder(chosen_BTD)
        local_BTD = self.local(self.drop(local_BTD), chosen_BTD)
        enriched_BTD = self.enrich(local_BTD)
        mixed_BD, attention_BT = self.attention(enriched_BTD)
        y_BD = self.attended(self.drop(mixed_BD), enriched_BTD[:, -1])
        y_BD = self.decoded(self.feed(y_BD), local_BTD[:, -1])
        return y_BD, TFTExplanation(shares_BTF, attention_BT)
