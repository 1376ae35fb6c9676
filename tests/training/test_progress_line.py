from types import SimpleNamespace

import torch

from ml_factory.training.device import Device
from ml_factory.training.progress_line import TrainingProgressLine
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingState


def test_progress_meter_line_shows_step_speed_and_time_left(caplog):
    """16 rows a step, 1,600 rows: 100 steps an epoch; a step takes 1/8 s, a tenth of it the input."""
    caplog.set_level("INFO", "ml_factory.training")
    now = [0.0]
    network = torch.nn.Linear(2, 1)
    run = TrainingState(network, 1600, TrainSpec(epochs=3, batch=16), Device("cpu", 1), {"model": "line"})
    run.device.recompiles.counts.update(train=2, evaluate=1)
    meter = TrainingProgressLine(run, clock=lambda: now[0])
    reported = []
    for step in range(1, 221):
        now[0] += 0.125 if step <= 110 else 0.0625
        meter.record_step(0.0125)
        run.step = step
        if step == 100:
            run.memory.history.append({})
        if step % 10 == 0:
            run.totals = torch.tensor([3.0, 2.0], dtype=torch.float64)
            reported.append(meter.log_if_due(600.0 if step < 200 else None))
    assert [line is not None for line in reported] == [step in (80, 210) for step in range(10, 221, 10)]
    assert reported[7] == (
        "epoch 1/3, step 80/300, loss 1.5000, 128 samples/s (128 on average), input 10.0%, 3 compiles, "
        "28 s left, next save in 10 min"
    )
    assert reported[20].startswith("epoch 2/3, step 210/300, loss 1.5000, 208 samples/s (168 on average)")
    assert reported[20].endswith("no saves") and caplog.messages == [reported[7], reported[20]]


def test_progress_meter_on_second_process_logs_nothing(caplog):
    caplog.set_level("INFO", "ml_factory.training")
    device = Device("cpu", 1, processes=SimpleNamespace(is_rank_zero=False, world=1, rank=1))
    run = TrainingState(torch.nn.Linear(2, 1), 16, TrainSpec(batch=16), device, {"model": "line"})
    assert TrainingProgressLine(run).log_if_due(None, force=True) and not caplog.messages
