"""The loop on XLA: a few programs for a whole training, random numbers by the step, and a run that changes devices."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory.datasets.windows import Windows
from ml_factory.errors import SettingsError
from ml_factory.models.registry import available_models, build_model, find_model_spec
from ml_factory.storage.serialization import deserialize_state, serialize_state
from ml_factory.training.batches import BatchLoader, evaluate_mean_loss
from ml_factory.training.device import deterministic_device, pick_device
from ml_factory.training.loop import run_training_loop, take_training_step
from ml_factory.training.spec import TrainSpec
from ml_factory.training.state import TrainingState
from tests.models.cases import SMALL
from tests.training.small_run import Kept, flat, small, weighted
from tests.xla.side_by_side import IDENTITY, device_of

NETWORKS = [name for name in available_models() if find_model_spec(name).windowed]
T, F = 16, 6


def market(rows: int):
    """Windows whose level tells their class."""
    rng = np.random.default_rng(0)
    y = rng.integers(-1, 2, rows)
    x_NTF = rng.normal(size=(rows, T, F)) + 1.5 * y[:, None, None]
    return x_NTF.astype(np.float32), y, rng.uniform(0.5, 2, rows)


@pytest.mark.parametrize(
    ("name", "more"), [*((name, {}) for name in NETWORKS), ("gru", {"offset_column": 1, "offset_bars": 2})]
)
def test_fit_on_xla_two_epochs_compile_at_most_two_programs_each(name, more, caplog):
    """Epochs, evaluations and saves: two compiles of each program at most, none after the first cycle."""
    x, y, w = market(160)
    settings = {**SMALL[name], "lookback": T, "epochs": 2, "batch": 16, "eval_batch": 16, "lr": 5e-3, "device": "xla"}
    settings |= {"save_seconds": 1e9, **more}
    model, kept = build_model(name, **settings, precision="fp32", dropout=0.2), Kept()
    result = model.fit(x[:128], y[:128], w[:128], validation=(x[128:], y[128:], w[128:]), checkpoints=kept)
    assert kept.steps == [8, 16]
    assert result.history[1]["train_loss"] < result.history[0]["train_loss"]
    programs = {name: result.compiles[name] for name in ("train", "evaluate")}
    assert all(1 <= count <= 2 for count in programs.values()), result.compiles
    assert caplog.text.count("XLA compiles the program train now") == 1
    # The same weights predict the same on the CPU.
    there = model.predict_proba(x)
    here = build_model(name, **{**settings, "device": "cpu"}, precision="fp32").load_state(
        {**model.get_state(), "settings": {**model.get_state()["settings"], "device": "cpu"}}
    )
    np.testing.assert_allclose(there, here.predict_proba(x), atol=1e-5)


def trained(kind: str, spec: dict, loss=weighted, dropout: float = 0.0, **more):
    device = pick_device(TrainSpec(device=kind, threads=1, precision=spec.get("precision", "fp32")))
    network, batch, _ = small(dropout)

    def there(positions):
        return tuple(device.to_device(part) for part in batch(positions))

    chosen = TrainSpec(**{"epochs": 6, "batch": 16, "threads": 1, **spec})
    result = run_training_loop(network, 48, there, loss, chosen, device, identity=IDENTITY, **more)
    return flat(network).cpu(), result, device


def test_fit_on_xla_full_lr_schedule_compiles_two_train_programs():
    """150 steps to a rate of almost 0; numbers that become 0 or 1 make no program."""
    weights, result, _ = trained("xla", {"epochs": 50, "warmup": 0.5})
    assert result.compiles["train"] <= 2
    expected, _, _ = trained("cpu", {"epochs": 50, "warmup": 0.5})
    assert (weights - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("first", [15_925, 36_295])
def test_take_step_on_xla_past_step_36300_compiles_no_new_program(first):
    """The square's correction becomes 1 at step 15,935 in float32, at 36,301 to 36,314 in a double, by its formula."""
    device = device_of("xla")
    network, batch, _ = small()
    run = TrainingState(network.to("xla"), 48, TrainSpec(batch=16, epochs=20_000), device, IDENTITY)
    run.step = first
    run.reset_loss_totals()
    for _ in range(25):
        take_training_step(run, lambda rows: tuple(map(device.to_device, batch(rows))), weighted)
    assert device.compiles["train"] <= 2
    assert run.step == first + 25 == int(run.flag[1])


def test_fit_on_xla_fold_of_similar_length_reuses_program():
    """Lengths up to an eighth apart are one; what is answered is what the CPU answers."""
    x, y, w = market(160)
    settings = {**SMALL["gru"], "lookback": T, "epochs": 1, "batch": 16, "eval_batch": 16, "precision": "fp32"}
    for rows, compiled in ((97, True), (104, False), (130, True)):
        model = build_model("gru", **settings, device="xla", dropout=0.0)
        result = model.fit(x[:rows], y[:rows], w[:rows], validation=(x[-30:], y[-30:], w[-30:]))
        assert (result.compiles["train"] > 0) is compiled, (rows, result.compiles)
        there = build_model("gru", **settings, device="cpu", dropout=0.0)
        expected = there.fit(x[:rows], y[:rows], w[:rows], validation=(x[-30:], y[-30:], w[-30:]))
        for name in ("train_loss", "val_loss"):
            assert result.history[0][name] == pytest.approx(expected.history[0][name], rel=1e-5)


def test_fit_on_xla_with_accumulation_compiles_accumulate_program():
    weights, result, _ = trained("xla", {"accumulate": 4})
    assert result.compiles["accumulate"] <= 2 and result.compiles["train"] <= 2
    expected, _, _ = trained("cpu", {})
    assert (weights - expected).norm() <= 1e-5 * expected.norm()


def test_dropout_on_xla_keeps_expected_share_and_follows_seed():
    device, layer, drawn = device_of("xla"), nn.Dropout(0.3), []
    with deterministic_device(device):
        for seed in (7, 7, 8):
            device.seed_step(seed)
            kept = layer(device.to_device(torch.ones(200, 200)))
            device.mark_step("train")
            drawn.append(kept.cpu())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    share = (drawn[0] > 0).float().mean().item()
    assert share == pytest.approx(0.7, abs=5 * (0.21 / 40_000) ** 0.5)
    assert torch.equal(drawn[0].unique(), torch.tensor([0.0, 1 / 0.7]))


def test_fit_on_xla_same_seed_repeats_bits_and_other_seed_differs():
    runs = [trained("xla", {"seed": seed}, dropout=0.5)[0] for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_fit_on_xla_resumed_after_kill_equals_uninterrupted_run_bitwise():
    expected, _, _ = trained("xla", {"accumulate": 2}, dropout=0.3)
    kept, calls = Kept(), []

    def killing(net, batch):
        calls.append(1)
        if len(calls) > 10:
            raise KeyboardInterrupt
        return weighted(net, batch)

    fast = {"accumulate": 2, "save_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        trained("xla", fast, killing, 0.3, checkpoints=kept)
    weights, result, _ = trained("xla", fast, dropout=0.3, checkpoints=kept)
    assert result.resumed_step == 5 and not result.nondeterminism
    assert torch.equal(weights, expected)


@pytest.mark.parametrize(("first", "second"), [("xla", "cpu"), ("cpu", "xla")])
def test_fit_resumed_on_other_device_ends_as_uninterrupted_run(first, second):
    """Its state makes the journey to the bit; its end is the one of a run that stayed, but for rounding."""
    kept, calls = Kept(), []

    def killing(net, batch):
        calls.append(1)
        if len(calls) > 8:
            raise KeyboardInterrupt
        return weighted(net, batch)

    with pytest.raises(KeyboardInterrupt):
        trained(first, {"save_seconds": 0.0}, killing, checkpoints=kept)
    before = kept.load()["state"]
    device = device_of(second)
    run = TrainingState(device.to_device(small()[0]), 48, TrainSpec(epochs=6, batch=16), device, IDENTITY)
    run.restore(before)
    after = deserialize_state(serialize_state(run.state()))
    for part in ("network", "optimizer", "totals", "step", "micro"):
        assert serialize_state({"": after[part]}) == serialize_state({"": before[part]}), part
    weights, result, _ = trained(second, {}, checkpoints=kept)
    expected, whole, _ = trained("cpu", {})
    assert result.resumed_step == 8 and result.nondeterminism
    assert any(why.startswith("device: began with") for why in result.nondeterminism)
    assert (weights - expected).norm() <= 1e-5 * expected.norm()
    assert result.history[-1]["train_loss"] == pytest.approx(whole.history[-1]["train_loss"], rel=1e-5)


def test_recompiles_changed_batch_shape_is_counted():
    """After a run of equal shapes, whose programs are there already, one step of another length is one compilation."""
    for shorter_at, compilations in ((0, None), (15, 1)):
        network, batch, _ = small()
        device, sizes = device_of("xla"), []

        def there(positions, batch=batch, device=device, sizes=sizes, shorter_at=shorter_at):
            sizes.append(1)
            parts = batch(positions[:9] if len(sizes) == shorter_at else positions)
            return tuple(map(device.to_device, parts))

        run_training_loop(network, 48, there, weighted, TrainSpec(epochs=6, batch=16), device, identity=IDENTITY)
        assert compilations is None or device.compiles["train"] == compilations


def test_pick_xla_with_fp16_raises_settings_error():
    with pytest.raises(SettingsError, match=r"no fp16 \[precision\].*bf16 or fp32"):
        pick_device(TrainSpec(device="xla", precision="fp16"))


def test_pick_xla_default_precision_is_bf16():
    assert pick_device(TrainSpec(device="xla")).precision == "bf16"
    weights, result, _ = trained("xla", {"precision": "bf16", "lr": 0.02})
    full, whole, _ = trained("xla", {"lr": 0.02})
    assert weights.dtype == torch.float32 and not torch.equal(weights, full)
    assert result.history[-1]["train_loss"] == pytest.approx(whole.history[-1]["train_loss"], rel=0.05)


@pytest.mark.parametrize("name", ["patchtst", "tcn"])
def test_fit_on_xla_with_recompute_equals_without(name):
    """Also where a block's input is the data itself (TCN)."""
    x, y, w = market(48)
    settings = {**SMALL[name], "lookback": T, "epochs": 3, "batch": 16, "lr": 5e-3, "device": "xla"}
    reported = []
    for recompute in (False, True):
        model = build_model(name, **settings, dropout=0.3, precision="fp32", recompute=recompute)
        result = model.fit(x, y, w, validation=(x, y, w))
        reported.append([(row["train_loss"], row["val_loss"]) for row in result.history])
        assert result.compiles["train"] <= 2
    np.testing.assert_allclose(reported[1], reported[0], rtol=1e-4)
    assert reported[1][-1][1] < 0.97 * reported[1][0][1]


def test_batch_loader_on_xla_gathers_windows_on_device():
    device = device_of("xla")
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(40, F)).astype(np.float32)
    windows = Windows(x_NF, np.arange(4, 40), 5)
    feed, at = BatchLoader(device, [windows, np.arange(36.0, dtype=np.float32)]), np.array([35, 0, 7])
    x_BTF, column_B = feed(at)
    assert feed.resident and x_BTF.device.type == "xla"
    np.testing.assert_array_equal(x_BTF.cpu(), windows[at])
    np.testing.assert_array_equal(column_B.cpu(), at)


def test_mean_loss_on_xla_with_padded_batch_equals_mean_over_all_rows():
    device, network = device_of("xla"), nn.Linear(2, 1)
    rng = np.random.default_rng(0)
    x, y, w = (rng.normal(size=shape).astype(np.float32) for shape in ((10, 2), (10, 1, 1), (10,)))

    def loss(net, batch):
        weight_B = batch[2]
        return (weight_B * (net(batch[0])[:, 0] - batch[1][:, 0, 0]).square()).sum(), weight_B.sum()

    with torch.no_grad():
        error = (network(torch.from_numpy(x)).numpy()[:, 0] - y[:, 0, 0]) ** 2
    found = evaluate_mean_loss(network, BatchLoader(device, [x, y, np.abs(w)]), loss, device, 4)
    assert found == pytest.approx(np.average(error, weights=np.abs(w)), rel=1e-6)
    assert device.compiles["evaluate"] <= 2


def test_fit_on_xla_after_cpu_training_in_same_process_succeeds():
    """The adapter starts XLA's client whatever the device: in a process of its own, CPU first."""
    text = "\n".join(
        [
            "from ml_factory.models.registry import build_model",
            "import numpy as np",
            "x, y = np.random.default_rng(0).normal(size=(40, 8, 3)).astype('f'), np.arange(40) % 3 - 1",
            "for device in ('cpu', 'xla', 'cpu'):",
            "    settings = dict(lookback=8, hidden=4, epochs=1, batch=20, device=device, precision='fp32')",
            "    build_model('lstm', **settings).fit(x, y)",
            "print('both')",
        ]
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("both\n"), done.stderr[-1500:]


def test_pick_tpu_sets_persistent_program_cache_path(tmp_path):
    """Configured, in a process of its own that believes it has a TPU: the CPU client cannot read its own files back."""
    text = (
        "import os, torch_xla.runtime as runtime\n"
        "from ml_factory.training.device import pick_device\n"
        "from ml_factory.training.spec import TrainSpec\n"
        "runtime.device_type = lambda: 'TPU'\n"
        "print([pick_device(TrainSpec()).kind for _ in range(2)], os.environ['XLA_PERSISTENT_CACHE_PATH'])\n"
    )
    there = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=there, check=False)
    assert done.stdout == f"['xla', 'xla'] {tmp_path / 'ml_factory-programs' / 'xla'}\n", done.stderr[-1500:]
