import pytest
import torch

from ml_factory.training.recompiles import RecompileMonitor

BATCH = (torch.zeros(16, 3), torch.zeros(16, dtype=torch.int64))


def call(dog: RecompileMonitor, compiled: int, inputs: object = BATCH, text: str = "IR {\n  %0 = f32[] x\n}"):
    dog.record_program_text("train", lambda: text)
    dog.record_compilations("train", compiled, inputs)


def test_recompile_monitor_two_compiles_in_first_cycle_give_no_warning():
    dog = RecompileMonitor()
    for compiled in (1, 1, 0):
        call(dog, compiled)
    dog.end_first_cycle()
    call(dog, 0)
    assert dog.counts == {"train": 2} and dog.complaints == []


@pytest.mark.parametrize(
    ("inputs", "cause"),
    [
        ((BATCH[0][:9], BATCH[1][:9]), "float32[16, 3] became float32[9, 3]; int64[16] became int64[9]"),
        ({"x": BATCH[0], "y": BATCH[1], "extra": 3}, "2 inputs became 3"),
        (BATCH, "no shape changed, so a Python number is part of the program"),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_recompile_monitor_extra_compile_warns_with_cause(inputs, cause, late, caplog):
    dog = RecompileMonitor()
    for compiled in (1,) if late else (1, 1):
        call(dog, compiled)
    if late:
        dog.end_first_cycle()
    call(dog, 1, inputs)
    assert len(dog.complaints) == 1 and cause in dog.complaints[0] and dog.complaints[0] in caplog.text


def test_recompile_monitor_changed_constant_shows_program_line():
    dog = RecompileMonitor()
    steady = "IR {\n  %0 = f32[] device_data\n  %1 = f32[3] mul(%0)\n}"
    for _ in range(3):
        call(dog, int(not dog.counts), text=steady)
    dog.end_first_cycle()
    call(dog, 1, text=steady)
    call(dog, 0, text=steady.replace("device_data", "prim::Constant(), value=1"))
    assert dog.complaints[1] == "the program train now holds: f32[] prim::Constant(), value=1"


def test_recompile_monitor_forget_allows_two_new_compiles():
    dog = RecompileMonitor()
    call(dog, 2)
    dog.end_first_cycle()
    dog.reset_programs()
    call(dog, 2, (BATCH[0][:8],))
    assert dog.counts == {"train": 4} and dog.complaints == []
    call(dog, 1, (BATCH[0][:8],))
    assert len(dog.complaints) == 1
