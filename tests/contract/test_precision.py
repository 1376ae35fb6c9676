import torch

from tests.contract.doors import FIRST_SCALE, LEAST_SCALE, STEPS_TO_GROW, LossScaler


def here(value):
    return value


def test_loss_scale_adapt_equals_torch_grad_scaler():
    """Overflows at these steps: both halve there, and double after 2,000 steps without one."""
    ours, theirs = LossScaler(here), torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=STEPS_TO_GROW)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    # Backoff of a half, where torch grows by 2 and halves likewise.
    for step in range(2300):
        overflow = step in (0, 1, 7, 2100)
        theirs.scale(torch.zeros(()))
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.adapt(torch.tensor(not overflow))
        assert float(ours.scale) == theirs.get_scale(), step


def test_loss_scale_stops_at_least_scale():
    scale = LossScaler(here)
    for _ in range(40):
        scale.adapt(torch.tensor(False))
    assert float(scale.scale) == LEAST_SCALE
