"""The progress line of a training: where it stands, how fast it goes, when it ends."""

import logging
import time

from ml_factory.training.state import TrainingRun

# A line at most this often, whatever the number of steps.
SECONDS_BETWEEN = 10.0
_log = logging.getLogger("ml_factory.training")


class ProgressMeter:
    """Rows and seconds of this session; `clock` gives seconds."""

    def __init__(self, run: TrainingRun, clock=time.perf_counter):
        self.run, self.clock = run, clock
        self.began = self.last_line = clock()
        self.rows = self.last_rows = 0
        self.input = 0.0

    def record_step(self, input_seconds: float) -> None:
        """A step is over, so much of which went into its batch."""
        self.rows += self.run.order.batch
        self.input += input_seconds

    def log_if_due(self, save_in: float | None, *, force: bool = False) -> str | None:
        """Log the line, if it is time for one; reads the epoch's sums, for which the device is waited for."""
        if not force and self.clock() - self.last_line < SECONDS_BETWEEN:
            return None
        line = self.line(save_in)
        self.last_line, self.last_rows = self.clock(), self.rows
        if self.run.device.processes.first:
            _log.info(line)
        return line

    def average(self) -> float:
        """Rows a second of this session."""
        return self.rows / max(self.clock() - self.began, 1e-9)

    def line(self, save_in: float | None) -> str:
        """save_in : seconds until a save is due; None where nothing is saved."""
        run, now = self.run, self.clock()
        total = run.order.steps_until(run.spec.epochs)
        loss_sum, weight = run.totals.tolist()
        spent = max(now - self.began, 1e-9)
        average = self.average()
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
