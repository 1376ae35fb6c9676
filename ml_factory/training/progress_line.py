"""Progress line of a training: position, speed, time left."""

import logging
import time

from ml_factory.training.state import TrainingState

SECONDS_BETWEEN = 10.0  # two lines, at least
_log = logging.getLogger("ml_factory.training")


class TrainingProgressLine:
    """Rows and seconds of this session; `clock` returns seconds."""

    def __init__(self, run: TrainingState, clock=time.perf_counter):
        self.run, self.clock, self.first_step = run, clock, run.step
        self.began = self.last_line = clock()

    def rows_per_second(self) -> float:
        """Return rows a second of this session."""
        return (self.run.step - self.first_step) * self.run.order.batch / max(self.clock() - self.began, 1e-9)

    def log_if_due(self, save_in: float | None) -> None:
        """Log the line when it is due; this waits for the epoch's sums on the device.

        save_in : seconds until a save is due; None without checkpoints.
        """
        if self.clock() - self.last_line < SECONDS_BETWEEN or not self.run.device.processes.is_rank_zero:
            return
        self.last_line, run, speed = self.clock(), self.run, self.rows_per_second()
        total, (loss_sum, weight) = run.order.steps_until_epoch(run.spec.epochs), run.totals.tolist()
        _log.info(
            "epoch %d/%d, step %s/%s, loss %.4f, %s samples/s, %d compiles, %s left, %s",
            min(run.epoch, run.spec.epochs), run.spec.epochs, f"{run.step:,}", f"{total:,}",
            loss_sum / weight if weight else 0.0, f"{speed:,.0f}", sum(run.device.compiles.values()),
            _minutes((total - run.step) * run.order.batch / max(speed, 1e-9)),
            "no saves" if save_in is None else f"next save in {_minutes(save_in)}",
        )  # fmt: skip


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
