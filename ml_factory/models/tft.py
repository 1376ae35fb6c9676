"""Temporal fusion transformer (Lim et al. 2021).

B batch, T steps of the window, S steps ahead that are forecast or looked at, U = T + S, F features, K known-future
variables, V static ones, D width, C classes or channels forecast, Q quantiles.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ml_factory.errors import SettingsError
from ml_factory.models import recurrent_layers
from ml_factory.models.base import check_model_setting_ranges
from ml_factory.models.heads import ForecastTask, Task
from ml_factory.models.tft_layers import (
    GateAddNorm,
    GatedResidualNetwork,
    InterpretableMultiHeadAttention,
    VariableSelectionNetwork,
)


@dataclass(frozen=True)
class TFTSpec:
    """width : of everything.
    layers : of the LSTMs.
    dropout : inside gated networks and before gates.

    each_dropout : inside each variable's own network; with 170 variables it is most of the training's time, so 0.
    known : names of the variables whose future is given (time of day); their past stands among the features.
    static : names of variables that do not change in a window.
    ahead : steps ahead that a classifier with known variables looks at; a forecast looks at those it forecasts.
    """

    width: int = 16
    heads: int = 2
    layers: int = 1
    dropout: float = 0.1
    each_dropout: float = 0.0
    known: tuple[str, ...] = ()
    static: tuple[str, ...] = ()
    ahead: int = 0

    def __post_init__(self):
        for name in ("known", "static"):
            object.__setattr__(self, name, _names(getattr(self, name), name))
        given = ("ahead",) if self.ahead else ()
        check_model_setting_ranges(
            self, "a TFT", whole=("width", "heads", "layers", *given), shares=("dropout", "each_dropout")
        )
        if self.width % self.heads:
            raise SettingsError(
                "Cannot build a TFT", where="heads", got=self.heads, wanted=f"a divisor of {self.width}"
            )


def _names(given: object, where: str) -> tuple[str, ...]:
    """Return names, each once. Raises SettingsError."""
    names = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise SettingsError("Cannot build a TFT", where=where, got=repr(given), wanted="names, each once")
    return names


@dataclass(frozen=True)
class _TFTExplanation:
    """Explanation of a TFT. Shares of variables sum to 1 over the last axis, and so does the attention.

    past_BTF, future_BSK, static_BV : shares of variables (None where there are none).
    attention_BSU : of each answer (a classifier has one), over the window's T steps and the S steps ahead.
    """

    past_BTF: Tensor
    future_BSK: Tensor | None
    static_BV: Tensor | None
    attention_BSU: Tensor


class TFT(nn.Module):
    """x_BTF, known_BSK, static_BV -> y_BSC (y_BSCQ), or logits_BC.

    A classifier's one answer stands at the window's last step, or with known inputs at the last step ahead that they
    reach. A forecast without known inputs is given how far ahead each step is.
    """

    Spec = TFTSpec

    def __init__(self, features: int, lookback: int, task: Task, spec: TFTSpec):
        super().__init__()
        D, self.forecasts = spec.width, isinstance(task, ForecastTask)
        context, drops = (D if spec.static else 0), (spec.dropout, spec.each_dropout)
        steps = task.steps if self.forecasts else spec.ahead
        if not self.forecasts and bool(spec.known) != bool(steps):
            raise SettingsError(
                "Known inputs are of steps ahead", where="ahead", got=f"{spec.ahead} with known={spec.known}",
                wanted="both or neither", next_step="name known inputs, and the steps that they are known for",
            )  # fmt: skip
        if spec.static:
            self.static = VariableSelectionNetwork(len(spec.static), D, 0, *drops)
            self.contexts = nn.ModuleList(
                GatedResidualNetwork(D, D, dropout=spec.dropout) for _ in range(2 + 2 * spec.layers)
            )
        self.past = VariableSelectionNetwork(features, D, context, *drops)
        self.encoder = recurrent_layers.LSTMLayer(D, D, spec.layers, spec.dropout)
        if steps:
            self.future = VariableSelectionNetwork(max(len(spec.known), 1), D, context, *drops)
            self.decoder = recurrent_layers.LSTMLayer(D, D, spec.layers, spec.dropout)
            self.register_buffer("ahead_S1", torch.arange(1, steps + 1)[:, None] / steps, persistent=False)
        self.drop = nn.Dropout(spec.dropout)
        self.local = GateAddNorm(D, D)
        self.enrich = GatedResidualNetwork(D, D, context=context, dropout=spec.dropout)
        self.steps, self.answers = steps, steps if self.forecasts else 1
        self.attention = InterpretableMultiHeadAttention(D, spec.heads, lookback + steps, self.answers)
        self.attended = GateAddNorm(D, D)
        self.feed = GatedResidualNetwork(D, D, dropout=spec.dropout)
        self.decoded = GateAddNorm(D, D)
        self.spec = spec
        channels = (task.channel_count(features), task.values_per_step) if self.forecasts else (task,)
        self.head = nn.Linear(D, torch.Size(channels).numel())
        self.shape = channels if self.forecasts and task.quantiles else channels[:1]

    def forward(self, x_BTF: Tensor, known_BSK: Tensor | None = None, static_BV: Tensor | None = None) -> Tensor:
        y_BSX, _ = self._decode(x_BTF, known_BSK, static_BV)
        y = self.head(y_BSX).unflatten(-1, self.shape)
        return y if self.forecasts else y[:, 0]

    @torch.no_grad()
    def explain(
        self, x_BTF: Tensor, known_BSK: Tensor | None = None, static_BV: Tensor | None = None
    ) -> _TFTExplanation:
        """Return variable shares and attention for these inputs."""
        return self._decode(x_BTF, known_BSK, static_BV)[1]

    def _decode(
        self, x_BTF: Tensor, known_BSK: Tensor | None, static_BV: Tensor | None
    ) -> tuple[Tensor, _TFTExplanation]:
        select_B1D, enrich_B1D, state, static_share_BV = self._contexts(static_BV)
        # ---------------------------------------------------------------- select variables, step by step (4.2)
        chosen_BUD, past_BTF = self.past(x_BTF, select_B1D)
        local_BUD, state = self.encoder(chosen_BUD, state)
        future_BSK = None
        if self.steps:
            ahead_BSK = self.ahead_S1.expand(len(x_BTF), -1, -1) if known_BSK is None else known_BSK
            ahead_BSD, future_BSK = self.future(ahead_BSK, select_B1D)
            decoded_BSD, _ = self.decoder(ahead_BSD, state)
            chosen_BUD = torch.cat([chosen_BUD, ahead_BSD], dim=1)
            local_BUD = torch.cat([local_BUD, decoded_BSD], dim=1)
        # ---------------------------------------------------------------- local order, then what is far (4.5)
        local_BUD = self.local(self.drop(local_BUD), chosen_BUD)
        enriched_BUD = self.enrich(local_BUD, enrich_B1D)
        mixed_BSD, attention_BSU = self.attention(enriched_BUD)
        y_BSD = self.attended(self.drop(mixed_BSD), enriched_BUD[:, -self.answers :])
        y_BSD = self.decoded(self.feed(y_BSD), local_BUD[:, -self.answers :])
        return y_BSD, _TFTExplanation(past_BTF, future_BSK, static_share_BV, attention_BSU)

    def _contexts(self, static_BV: Tensor | None) -> tuple:
        """Return the contexts of static variables for selection, enrichment and the encoder's first state (4.3); None
        without.
        """
        if not self.spec.static:
            return None, None, None, None
        chosen_B1D, share_B1V = self.static(static_BV[:, None])
        select, enrich, *states = (grn(chosen_B1D) for grn in self.contexts)
        h_LBD, c_LBD = torch.cat(states, dim=1).transpose(0, 1).chunk(2)
        return select, enrich, (h_LBD.contiguous(), c_LBD.contiguous()), share_B1V[:, 0]
