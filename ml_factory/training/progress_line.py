"""Progress line of a training: position, speed, time left."""

import logging
import time

from ml_factory.training.state import TrainingState

# Seconds between two lines, at least.
SECONDS_BETWEEN = 10.0
_log = logging.getLogger("ml_factory.training")


class TrainingProgressLine:
    """Rows and seconds of this session; `clock` returns seconds."""

    def __init__(self, run: TrainingState, clock=time.perf_counter):
        self.run, self.clock = run, clock
        self.began = self.last_line = clock()
        self.rows = self.last_rows = 0
        self.input = 0.0

    def record_step(self, input_seconds: float) -> None:
        """Record the end of a step; input_seconds : time spent on its batch."""
        self.rows += self.run.order.batch
        self.input += input_seconds

    def log_if_due(self, save_in: float | None, *, force: bool = False) -> str | None:
        """Log the line when it is due; this waits for the epoch's sums on the device."""
        if not force and self.clock() - self.last_line < SECONDS_BETWEEN:
            return None
        line = self.line(save_in)
        self.last_line, self.last_rows = self.clock(), self.rows
        if self.run.device.processes.is_rank_zero:
            _log.info(line)
        return line

    def rows_per_second(self) -> float:
        """Return rows a second of this session."""
        return self.rows / max(self.clock() - self.began, 1e-9)

    def line(self, save_in: float | None) -> str:
        """Format the line. save_in : seconds until a save is due; None without checkpoints."""
        run, now = self.run, self.clock()
        total = run.order.steps_until_epoch(run.spec.epochs)
        loss_sum, weight = run.totals.tolist()
        spent = max(now - self.began, 1e-9)
        average = self.rows_per_second()
        at_once = (self.rows - self.last_rows) / max(now - self.last_line, 1e-9)
        left = (total - run.step) * run.order.batch / average if average else 0.0
        parts = [
            f"epoch {min(run.epoch, run.spec.epochs)}/{run.spec.epochs}",
            f"step {run.step:,}/{total:,}",
            f"loss {loss_sum / weight if weight else 0.0:.4f}",
            f"{at_once:,.0f} samples/s ({average:,.0f} on average)",
            f"input {self.input / spent:.1%}",
            f"{sum(run.device.recompiles.counts.values())} compiles",
            f"{_minutes(left)} left",
            "no saves" if save_in is None else f"next save in {_minutes(save_in)}",
        ]
        return ", ".join(parts)


def _minutes(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
