"""Non-zero ranks of a training with several processes: they take part in the fit of a network, and write nothing.

torchrun starts every process with the same command. Rank 0 holds the checkpoints, keeps the log, and writes artifact,
predictions and report. The other ranks read the same data; a booster does not use them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.interrupt import stop
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import WITH_DATA, build_model, find_model_spec
from ml_factory.process_identity import launched_by_torchrun, process_rank
from ml_factory.settings import RunSettings

device_module = LazyModule("ml_factory.training.device")  # torch comes with the networks only


def broadcast_fit_decision(spec: RunSettings, fitting: bool = False) -> bool:
    """Return the decision of rank 0 whether a fit begins now, in all ranks; without other ranks, `fitting` itself."""
    if not launched_by_torchrun() or not find_model_spec(spec.model).windowed:
        return fitting
    # The processes meet where the training's device is chosen.
    settings = {name: value for name, value in dict(spec.settings).items() if name not in WITH_DATA}
    device = device_module.pick_device(build_model(spec.model, **settings).settings)
    return device.processes.broadcast({"fitting": fitting})["fitting"]


@contextmanager
def worker_rank() -> Iterator[None]:
    """Inside the block a rank other than 0 takes part in a fit. Raises FactoryError when rank 0 ends before it does."""
    stop.listen()  # rank 0 receives the signal too: it saves, and exits
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in ("gloo", "NCCL", "peer")):
            raise
        stop.resend_if_requested()
        raise FactoryError(
            "Rank 0 has left this training", got=str(error).splitlines()[0][:200],
            next_step="see its message; start all ranks again: they resume from its last checkpoint",
        ) from error  # fmt: skip
    finally:
        stop.remove_listener()


def check_single_rank(verb: str) -> None:
    """Raise SettingsError in the further ranks of torchrun, for a verb that one process does."""
    if process_rank():
        raise SettingsError(
            "Only train runs as several processes", where=verb, got=f"rank {process_rank()}", wanted="one process",
            next_step="start it without torchrun",
        )  # fmt: skip
