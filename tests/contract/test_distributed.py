"""Two processes with the variables of torchrun, over gloo: the numbers of one."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from ml_factory.errors import FactoryError
from tests.contract import doors
from tests.contract.test_training_state import CPU, IDENTITY
from tests.training.small_run import ROWS, Kept, flat, small, weighted

ROOT = Path(__file__).resolve().parents[2]
SPEC = {
    "epochs": 4,
    "batch": 24,
    "lr": 0.02,
    "precision": "fp32",
    "device": "cpu",
    "threads": 1,
    "save_seconds": 0.0,
    "clip": 1e9,
}


PARTS = (1, 3)
SECOND_EPOCH = 3  # its first step: the last line and the last look at the flag lie behind, the next save before it ends


def norms_of(work) -> list[float]:
    """Of the mean loss's gradient at every step that `work()` takes: Adam alone would not notice a wrong size."""
    norms, step = [], doors.AdamW.step

    def noting(optimizer, numbers, factor, ok):
        norms.append(float(factor * doors.total_gradient_norm(optimizer.gradients())))
        step(optimizer, numbers, factor, ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doors.AdamW, "step", noting)
        work()
    return norms


def broken_once(rank: int, calls: list):
    """A loss that the second process, or one that is alone, finds not finite in that step."""

    def broken(net, batch):
        total, weight = weighted(net, batch)
        calls.append(1)
        return total * (float("nan") if len(calls) == SECOND_EPOCH and rank else 1.0), weight

    return broken


def stopped(device, rank: int) -> dict:
    """A fit that saves after every step, where the flag goes up in mid-epoch."""
    network, batch, _ = small()
    kept, calls = Kept(), []
    loss = broken_once(rank, calls)
    try:
        doors.run_training_loop(
            network, ROWS, batch, loss, doors.TrainSpec(**SPEC), device, identity=IDENTITY, checkpoints=kept
        )
    except FactoryError as error:
        return {"error": str(error), "calls": len(calls), "saves": kept.steps}
    return {}


def assessed(device) -> dict:
    """Losses of validation rows of which neither process has the same number, and which weigh unequally."""
    network, batch, _ = small()
    _, y, w = batch(np.arange(ROWS))
    feed = doors.BatchLoader(device, [batch(np.arange(ROWS))[0].numpy()[:19], y.numpy()[:19], w.numpy()[:19]])
    held = lambda: doors.evaluate_mean_loss(network, feed, weighted, device, 4)  # noqa: E731
    result = doors.run_training_loop(
        network,
        ROWS,
        batch,
        weighted,
        doors.TrainSpec(**SPEC),
        device,
        identity=IDENTITY,
        validation=doors.Validation(held),
    )
    return {"val_losses": [row["val_loss"] for row in result.history], "best": result.best_epoch}


def normalised(rank: int = 0, world: int = 1) -> dict:
    """Outputs, gradients and statistics of a synchronised batch norm over this process's rows."""
    torch.manual_seed(0)
    x, norm = (torch.randn(8, 3, 4, 4) * 3 + 5)[rank::world].clone().requires_grad_(), doors.SyncBatchNorm2d(3)
    out = norm(x)
    (out**3).sum().backward()
    gradient = norm.weight.grad.clone()
    if world > 1:
        torch.distributed.all_reduce(gradient)
    rows = {"out": out, "input": x.grad, "evaluated": norm.eval()(x)}
    shared = {"weight": gradient, "mean": norm.running_mean, "variance": norm.running_var}
    shared["count"] = norm.num_batches_tracked
    return {part: {name: value.tolist() for name, value in found.items()}
            for part, found in (("rows", rows), ("shared", shared))}  # fmt: skip


def work(folder: str) -> None:
    """One of the processes: for each number of parts trained, killed in the third epoch, gone on."""
    device, reported = doors.pick_device(doors.TrainSpec(**SPEC)), {}
    for parts in PARTS:
        spec, kept, drawn, sizes = doors.TrainSpec(**SPEC, accumulate=parts), Kept(), [], []

        def killing(net, batch, parts=parts, drawn=drawn, sizes=sizes):
            drawn.append(torch.rand(1).item())
            sizes.append(len(batch[0]))
            if len(sizes) > 5 * parts:
                raise KeyboardInterrupt
            return weighted(net, batch)

        network, batch, _ = small()
        with suppress(KeyboardInterrupt):
            norms = norms_of(
                lambda s=spec, b=batch: doors.run_training_loop(
                    small()[0], ROWS, b, weighted, s, device, identity=IDENTITY
                )
            )
            doors.run_training_loop(network, ROWS, batch, killing, spec, device, identity=IDENTITY, checkpoints=kept)
        network, batch, _ = small()
        result = doors.run_training_loop(
            network, ROWS, batch, weighted, spec, device, identity=IDENTITY, checkpoints=kept
        )
        reported[parts] = {
            "weights": flat(network).tolist(),
            "losses": [row["train_loss"] for row in result.history],
            "resumed": result.resumed_step,
            "saves": len(kept.steps),
            "drawn": drawn[0],
            "norms": norms,
            "sizes": sizes,
        }
    reported["judged"] = assessed(device)
    reported["stopped"] = stopped(device, device.processes.rank)
    reported["normalised"] = normalised(device.processes.rank, 2)
    torch.distributed.destroy_process_group()
    reported["threads"] = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    Path(folder, f"{device.processes.rank}.json").write_text(json.dumps(reported))


# Imports once for both processes.
START = """
import os, sys
from tests.contract.test_distributed import work

child = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(int(not child))
work(sys.argv[1])
sys.exit(child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What both processes ended with: by rank, then by number of parts."""
    folder = tmp_path_factory.mktemp("pair")
    with socket.create_server(("127.0.0.1", 0)) as free:
        alike = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2",
                 "TORCHELASTIC_RUN_ID": "pair", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
    # Processes that are not at the same step wait for each other for ever.
    done = subprocess.run(
        [sys.executable, "-c", START, folder], cwd=ROOT, env=os.environ | alike, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("parts", PARTS)
def test_fit_in_two_processes_equals_one_process(pair, parts):
    network, batch, _ = small()
    alone = doors.run_training_loop(network, ROWS, batch, weighted, doors.TrainSpec(**SPEC), CPU, identity=IDENTITY)
    norms = norms_of(
        lambda: doors.run_training_loop(
            small()[0], ROWS, batch, weighted, doors.TrainSpec(**SPEC), CPU, identity=IDENTITY
        )
    )
    reported = [answers[str(parts)] for answers in pair]
    for one in reported:
        np.testing.assert_allclose(one["losses"], [row["train_loss"] for row in alone.history], rtol=1e-6)
        np.testing.assert_allclose(one["weights"], flat(network).numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(one["norms"], norms, rtol=1e-4)
        assert one["resumed"] == 5 and set(one["sizes"]) == {12 // parts}
    assert reported[0]["weights"] == reported[1]["weights"]


def test_fit_in_two_processes_first_saves_and_each_draws_different_numbers(pair):
    one, other = (answers["1"] for answers in pair)
    assert one["saves"] > 0 and other["saves"] == 0
    assert one["drawn"] != other["drawn"]


def test_fit_in_two_processes_validation_loss_is_mean_over_all_rows(pair):
    alone = assessed(CPU)
    for reported in (answers["judged"] for answers in pair):
        np.testing.assert_allclose(reported["val_losses"], alone["val_losses"], rtol=1e-5)
        assert reported["best"] == alone["best"]


def test_fit_in_two_processes_destroyed_group_leaves_no_thread_of_gloo(pair):
    """A thread that outlives the group needs the interpreter's lock at its end: the process aborts now and then."""
    for reported in pair:
        assert reported["threads"] and not [name for name in reported["threads"] if "gloo" in name]


def test_fit_in_two_processes_with_non_finite_loss_of_one_stops_both_at_same_step(pair):
    """One of them saves, and looks at the flag before it: it must not stop alone."""
    alone, one, other = stopped(CPU, rank=1), *(answers["stopped"] for answers in pair)
    assert one["error"] == other["error"] == alone["error"] and "step 3, epoch 2" in one["error"]
    assert one["calls"] == other["calls"] == alone["calls"] == 4
    assert one["saves"] == alone["saves"] == [1, 2, 2] and other["saves"] == []


def test_processes_single_process_returns_values_unchanged():
    values = torch.ones(2)
    assert doors.ProcessGroup().all_reduce_sum(values) is values and doors.ProcessGroup().broadcast({"a": 1}) == {
        "a": 1
    }
    assert doors.ProcessGroup().broadcast(None) is None and doors.ProcessGroup().is_rank_zero


def test_batch_norm_of_two_processes_equals_one_process_with_all_rows(pair):
    alone = normalised()
    for rank, found in enumerate(answers["normalised"] for answers in pair):
        for name, value in found["rows"].items():
            np.testing.assert_allclose(value, np.array(alone["rows"][name])[rank::2], rtol=1e-4, atol=1e-4)
        for name, value in found["shared"].items():
            np.testing.assert_allclose(value, alone["shared"][name], rtol=1e-5, atol=1e-4)
