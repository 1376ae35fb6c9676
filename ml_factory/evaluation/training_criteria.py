"""Criteria of a successful training, measured: stable minimum, validation near training, speed of the accelerator."""

from collections.abc import Mapping

import pandas as pd

STABLE_SHARE = 0.02  # of the loss: what it may change over the last third of the epochs
NEAR_SHARE = 0.10  # of the training loss: how far validation may be above it
SPEED_SHARE = 0.10  # of the time of a CPU


def training_criteria_table(
    history: pd.DataFrame, machine: Mapping, cpu_history: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Return a row per criterion: measured, wanted, and whether it is met ("yes", "no" or "not measured").

    history : a row per epoch: epoch, train_loss, val_loss, seconds.
    machine : of the training, with its `device`.
    cpu_history : of the same training for an epoch or more on the CPU; None where there is no accelerator.
    """
    best = history.loc[history["val_loss"].idxmin()]
    gap = float(best["val_loss"] / best["train_loss"] - 1)
    rows = [
        _stable_minimum(history, best),
        (
            "validation loss near training loss", f"{best['val_loss']:.4f} and {best['train_loss']:.4f}: {gap:+.1%}",
            f"at most {NEAR_SHARE:+.0%}", _yes(gap <= NEAR_SHARE),
        ),
        _speed(history, str(machine.get("device", "cpu")), cpu_history),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["criterion", "measured", "wanted", "met"]).set_index("criterion")


def _stable_minimum(history: pd.DataFrame, best: pd.Series) -> tuple[str, str, str, str]:
    """Return the row on the loss: its least value was left behind, or its last third hardly changes."""
    tail = history["val_loss"].tail(max(2, len(history) // 3))
    change = float((tail.max() - tail.min()) / tail.mean())
    measured = f"least in epoch {best['epoch']:.0f} of {history['epoch'].iloc[-1]:.0f}, then within {change:.1%}"
    met = len(history) > 2 and change <= STABLE_SHARE
    wanted = f"changes by at most {STABLE_SHARE:.0%} over the last third of 3 epochs or more"
    return "validation loss at a stable minimum", measured, wanted, _yes(met)


def _speed(history: pd.DataFrame, device: str, cpu_history: pd.DataFrame | None) -> tuple[str, str, str, str]:
    """Return the row on the time of an epoch; the median leaves out those that compile."""
    name, wanted = "time of an epoch compared with the CPU", f"at most {SPEED_SHARE:.0%} on an accelerator"
    seconds = float(history["seconds"].median())
    if device.startswith("cpu") or cpu_history is None:
        return name, f"{seconds:.2f} s on {device}, no comparison", wanted, "not measured"
    share = seconds / float(cpu_history["seconds"].median())
    return name, f"{seconds:.2f} s on {device}, {share:.1%} of the CPU's", wanted, _yes(share <= SPEED_SHARE)


def _yes(met: bool) -> str:
    return "yes" if met else "no"
