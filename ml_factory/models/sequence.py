"""Networks that read a window step by step. B batch, T time steps, F features, C classes, H hidden units."""

from dataclasses import dataclass

from torch import Tensor, nn

from ml_factory.errors import SettingsError


@dataclass(frozen=True)
class LSTMSpec:
    """hidden : units a layer. dropout : between layers and before the head."""

    hidden: int = 64
    layers: int = 1
    dropout: float = 0.1

    def __post_init__(self):
        for name in ("hidden", "layers"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise SettingsError(
                    "Cannot build an LSTM", where=name, got=getattr(self, name), wanted="an integer >= 1"
                )
        if not 0 <= self.dropout < 1:
            raise SettingsError("Cannot build an LSTM", where="dropout", got=self.dropout, wanted="in [0, 1)")


class LSTM(nn.Module):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; forget gate: Gers et al. 2000).

    x_BTF -> logits_BC from the last step's hidden state.
    """

    Spec = LSTMSpec

    def __init__(self, features: int, lookback: int, classes: int, spec: LSTMSpec):
        super().__init__()
        between = spec.dropout if spec.layers > 1 else 0.0
        self.rnn = nn.LSTM(features, spec.hidden, spec.layers, batch_first=True, dropout=between)
        self.drop = nn.Dropout(spec.dropout)
        self.head = nn.Linear(spec.hidden, classes)
        self._open_forget_gates()

    def _open_forget_gates(self) -> None:
        """Biases of 1 at the start (Jozefowicz et al. 2015): what was read is kept until learnt otherwise."""
        # torch's order of gates is input, forget, cell, output.
        for name, parameter in self.rnn.named_parameters():
            if name.startswith("bias_ih"):
                hidden = self.rnn.hidden_size
                nn.init.ones_(parameter.data[hidden : 2 * hidden])

    def forward(self, x_BTF: Tensor) -> Tensor:
        hidden_BTH, _ = self.rnn(x_BTF)
        return self.head(self.drop(hidden_BTH[:, -1]))
