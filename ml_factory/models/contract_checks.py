"""Contract checks that every model must pass, on a few synthetic rows, in seconds.

B batch, T = 32 time steps, F = 6 features, C = 3 classes.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.base import CLASSES, ModelBase
from ml_factory.seeding import derive_seed, seeded_generator

T, F, ROWS, STEPS = 32, 6, 48, 300
CPU = {"device": "cpu", "threads": 1}
Make = Callable[..., ModelBase]


def check_model_contract(name: str, make: Make, *, windowed: bool) -> tuple[str, ...]:
    """Run all contract checks and return their names.

    make : function from settings to an unfitted model.
    windowed : True for a network.
    Raises SettingsError naming every violation.
    """
    checks = (*(NETWORK_CHECKS if windowed else ()), *MODEL_CHECKS)
    failures = []
    for check in checks:
        sentence, more = (check.__doc__ or "").partition(".")[0], CPU | {"lookback": T} if windowed else {}
        try:
            failures += [
                f"{sentence}: {complaint}" for complaint in check(lambda more=more, **own: make(**more, **own))
            ]
        except (
            FactoryError,
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
            IndexError,
            NotImplementedError,
        ) as error:
            failures.append(f"{sentence}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    if failures:
        raise SettingsError(
            "The model violates the contract", where=name, got="; ".join(failures),
            wanted=f"no failure in {len(checks)} checks", next_step="fix it, and register it again",
        )  # fmt: skip
    return tuple((check.__doc__ or "").partition(".")[0] for check in checks)


def _build_contract_network(model: ModelBase, seed: int = 0) -> nn.Module:
    """Build the estimator's network for F features, weights drawn from the seed; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, "contract"))
        return model.kind(F, T, len(CLASSES), model.network_spec)


def _contract_windows(rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    """Return normal x_BTF."""
    return torch.from_numpy(seeded_generator(seed, "contract").normal(size=(rows, T, F)).astype(np.float32))


def _check_contract_logits(make: Make) -> Iterator[str]:
    """x_BTF gives finite logits_BC and is left as it was."""
    model = make()
    network, x_BTF = _build_contract_network(model).eval(), _contract_windows()
    before = x_BTF.clone()
    with torch.no_grad():
        y_BC = network(x_BTF)
    if y_BC.shape != (ROWS, len(CLASSES)):
        yield f"got shape {tuple(y_BC.shape)}, wanted {(ROWS, len(CLASSES))}"
    elif not torch.isfinite(y_BC).all():
        yield "not finite"
    if not torch.equal(before, x_BTF):
        yield "the inputs were changed in place"


def _check_contract_gradients(make: Make) -> Iterator[str]:
    """The gradient reaches every parameter."""
    with torch.random.fork_rng(devices=[]):
        model = make()
        network = _build_contract_network(model).train()
        network(_contract_windows()).square().sum().backward()
    lost = [name for name, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    if lost:
        yield f"none at {', '.join(lost[:5])}"


def _check_contract_overfits_batch(make: Make) -> Iterator[str]:
    """One batch can be learnt by heart."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(0, "contract", "overfit"))
        model, y_B = make(), torch.arange(24) % len(CLASSES)
        network, x_BTF = _build_contract_network(model), _contract_windows(24)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network.train()(x_BTF), y_B).backward()
            optimizer.step()
            if step % 25 == 24:
                with torch.no_grad():
                    loss = float(nn.functional.cross_entropy(network.eval()(x_BTF), y_B))
                if loss < 0.2:
                    return
    yield f"after {STEPS} steps on 24 rows the log loss is {loss:.2f}, wanted below 0.2"


def _check_contract_batch_independence(make: Make) -> Iterator[str]:
    """A row is answered alone as in company."""
    model = make()
    network, x_BTF = _build_contract_network(model).eval(), _contract_windows()
    with torch.no_grad():
        one = network(x_BTF[7:8])
        gap = (network(x_BTF)[7:8] - one).abs().max()
    if not gap < 1e-4:
        yield f"its logits differ by {float(gap):.1e}"


def _check_contract_seed(make: Make) -> Iterator[str]:
    """The same seed trains to the same bits, another seed to others."""
    p = [_fitted(make, seed=seed).predict_proba(_rows(make())[0]) for seed in (0, 0, 1)]
    if not np.array_equal(p[0], p[1]):
        yield "two trainings from one seed differ"
    if np.array_equal(p[0], p[2]):
        yield "two seeds train to the same"


def _check_contract_probabilities(make: Make) -> Iterator[str]:
    """Probabilities have the agreed form."""
    p_N3 = _fitted(make).predict_proba(_rows(make())[0])
    if p_N3.shape != (ROWS, 3) or p_N3.dtype != np.float64:
        yield f"got {p_N3.dtype} {p_N3.shape}, wanted float64 {(ROWS, 3)}"
    elif not (np.isfinite(p_N3).all() and (p_N3 >= 0).all() and np.allclose(p_N3.sum(axis=1), 1, atol=1e-6)):
        yield "rows do not sum to 1"


def _check_contract_save_load(make: Make) -> Iterator[str]:
    """Saved and loaded it predicts the same."""
    model = _fitted(make)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        again = make().load(Path(folder) / "model")
    x = _rows(model)[0]
    if not np.array_equal(model.predict_proba(x), again.predict_proba(x)):
        yield "its probabilities differ"


NETWORK_CHECKS = (
    _check_contract_logits,
    _check_contract_gradients,
    _check_contract_overfits_batch,
    _check_contract_batch_independence,
)
MODEL_CHECKS = (_check_contract_probabilities, _check_contract_seed, _check_contract_save_load)


def _rows(model: ModelBase) -> tuple[np.ndarray | Windows, np.ndarray]:
    """Return x and y that the model can read: windows for networks, their last rows for the others."""
    x_NTF, y = _contract_windows(seed=1).numpy(), np.arange(ROWS) % 3 - 1
    if not hasattr(model, "kind"):
        return x_NTF[:, -1], y
    last = np.arange(T - 1, ROWS * T, T)
    return Windows(x_NTF.reshape(ROWS * T, -1), last, T), y


def _fitted(make: Make, **settings) -> ModelBase:
    model = make(**settings)
    model.fit(*_rows(model), limits={"epochs": 1, "rounds": 4})
    return model
