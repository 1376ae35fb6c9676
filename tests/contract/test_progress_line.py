from types import SimpleNamespace

import torch

from tests.contract.doors import Device, TrainingReports, TrainingState, TrainSpec


def test_progress_line_shows_step_speed_and_time_left(caplog):
    """16 rows a step, 100 steps an epoch, 1/8 s a step. A second process says nothing."""
    caplog.set_level("INFO", "ml_factory.training")
    second = SimpleNamespace(is_rank_zero=False, world=1, rank=1)
    for device in (Device("cpu", 1), Device("cpu", 1, processes=second)):
        now, network = [0.0], torch.nn.Linear(2, 1)
        run = TrainingState(network, 1600, TrainSpec(epochs=3, batch=16), device, {"model": "line"})
        run.device.compiles.update(train=2, evaluate=1)
        reports = TrainingReports(run, clock=lambda now=now: now[0])
        for step in range(1, 161):
            now[0], run.step = 0.125 * step, step
            run.totals = torch.tensor([3.0, 2.0], dtype=torch.float64)
            run.memory.history = [{}] * (step >= 100)
            reports.report(600.0 if step < 100 else None)
    assert caplog.messages == [
        "epoch 1/3, step 80/300, loss 1.5000, 128 samples/s, 3 compiles, 28 s left, next save in 10 min",
        "epoch 2/3, step 160/300, loss 1.5000, 128 samples/s, 3 compiles, 18 s left, no saves",
    ]
