"""Log of a worker as training guides for TPU slices print it: a line every few steps, an epoch's end, the totals.

10.164.0.25 [0] | Training Device=xla:0/2 Epoch=8 Step=310 Loss=0.26758 Rate=1079.01 GlobalRate=1420.67 …
[0] Epoch 8 train end 18:02:10, Epoch Time=0:00:28, Replica Train Samples=39664, Reduced GlobalRate=45676.50
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import tensorboardX
import torch

from ml_factory.recipes.run import is_writing_process, tpu_host
from ml_factory.storage.mirror import Mirror
from ml_factory.training.device import Device

_NEW_SHARE = 0.6  # of the newest rate in its moving average


class WorkerLog:
    """Callback of the training loop that prints and writes the log of this process, and TensorBoard events of rank 0.

    folder : of worker-N.log (N the rank, on a TPU slice the host) and events; or gs://, where they are copied to after
        every epoch, and a log that another machine began is continued.
    samples : of an epoch, of all replicas together.
    batch : samples of a step, of all replicas together.
    every : steps between two lines.
    """

    def __init__(
        self, folder: str | Path, device: Device, *, samples: int, batch: int, every: int,
        emit: Callable[[str], object] = print,
    ):  # fmt: skip
        shares = device.batch_share_count
        self.device, self.samples, self.batch, self.every = device, samples, max(batch // shares, 1) * shares, every
        self._emit, self._bucket = emit, Mirror(str(folder).rstrip("/")) if str(folder).startswith("gs://") else None
        self.folder = self._bucket.folder if self._bucket else Path(folder).expanduser()
        if self._bucket:
            self._bucket.pull()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.worker = tpu_host() or int(os.environ.get("GROUP_RANK") or 0)
        self.address = _own_address()
        self.path = self.folder / f"worker-{tpu_host() or device.processes.rank}.log"
        self._events = tensorboardX.SummaryWriter(str(self.folder)) if is_writing_process() else None
        self.rates: list[float] = []  # of the epochs of this session
        self._rate = 0.0
        self._begin_epoch(1)

    def remember(self, past: Iterable[Mapping]) -> None:
        """Go on after the epochs of earlier sessions."""
        self._begin_epoch(1 + len(list(past)))

    def log_steps(self, epoch: int, step: int, loss: float) -> None:
        now, replicas = time.time(), self.device.batch_share_count
        if self._from_step is None:  # the first line of an epoch, or of a session that resumes in one
            self._from_step = self._last_step = max(step - self.every, 0)
        rate = (step - self._last_step) * self.batch / replicas / max(now - self._last, 1e-9)
        self._rate = rate if not self._rate else _NEW_SHARE * rate + (1 - _NEW_SHARE) * self._rate
        mean = (step - self._from_step) * self.batch / replicas / max(now - self._began, 1e-9)
        self._last, self._last_step = now, step
        self._say(
            f"{self.address} [{self.worker}] | Training Device={self.device.torch_device}/{self.device.processes.rank} "
            f"Epoch={epoch} Step={step} Loss={loss:.5f} Rate={self._rate:.2f} GlobalRate={mean:.2f} Time={_hour(now)}"
        )
        self._record(self._steps_until(epoch - 1) + step, {"train/loss": loss, "train/rate": self._rate})

    def end_training(self) -> None:
        """Log the end of an epoch's steps, before it is evaluated."""
        epoch, now, processes = self._epoch, time.time(), self.device.processes
        seconds = now - self._began
        steps = self._steps_until(epoch) - self._steps_until(epoch - 1) - (self._from_step or 0)
        rate = steps * self.batch / max(seconds, 1e-9) / processes.world
        total = float(processes.all_reduce_sum(self.device.to_device(torch.tensor([rate]))))
        self.rates.append(total)
        self._say(
            f"[{self.worker}] Epoch {epoch} train end {_hour(now)}, Epoch Time={timedelta(seconds=round(seconds))}, "
            f"Replica Train Samples={steps * self.batch // self.device.batch_share_count}, "
            f"Reduced GlobalRate={total:.2f}"
        )
        self._record(self._steps_until(epoch), {"train/global_rate": total})

    def __call__(self, epoch: int, metrics: Mapping) -> None:
        """Log the evaluation of an epoch (from 1) on the held-out training samples."""
        self._say(f"[{self.worker}] Epoch {epoch} validation end {_hour(time.time())}, "
                  f"Loss={metrics['val_loss']:.5f}, Accuracy={metrics['accuracy']:.2%}")  # fmt: skip
        self._record(
            self._steps_until(epoch),
            {"validation/loss": metrics["val_loss"], "validation/accuracy": metrics["accuracy"]},
        )
        if self._bucket:
            self._bucket.push_in_background()
        self._begin_epoch(epoch + 1)

    def end(self, history: Sequence[Mapping], accuracy: float) -> dict:
        """Log the test accuracy of the chosen epoch and the totals of all, and return these: seconds, rate."""
        facts = {
            "train_seconds": sum(one["seconds"] for one in history),
            "samples_per_second": sum(self.rates) / max(len(self.rates), 1),
        }
        self._record(self._steps_until(len(history)), {"test/accuracy": accuracy})
        self._say(f"[{self.worker}] Total Train Time: {timedelta(seconds=round(facts['train_seconds']))}")
        self._say(f"[{self.worker}] Max Accuracy: {accuracy:.2%}")
        self._say(f"[{self.worker}] Avg. Global Rate: {facts['samples_per_second']:.2f} examples per second")
        return facts

    def close(self) -> None:
        """Close the events, and copy everything to the bucket."""
        if self._events is not None:
            self._events.close()
        if self._bucket:
            self._bucket.push()

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch, self._last_step = epoch, 0
        self._began = self._last = time.time()
        self._from_step: int | None = None

    def _steps_until(self, epoch: int) -> int:
        return epoch * self.samples // self.batch

    def _record(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()  # a killed run loses none before

    def _say(self, line: str) -> None:
        self._emit(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _own_address() -> str:
    """Return this machine's address in its network; 127.0.0.1 without one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _hour(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
