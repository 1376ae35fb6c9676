"""What the further processes of a training do: their share of every step, and nothing else.

torchrun starts every process with the same words. The first one does all that is done once: it holds the checkpoints,
keeps the record, writes artifact, predictions and report. The others read the same data and take part in its fit; a
booster has no use for them.
"""

import importlib

from ml_factory.checkpoints.stop_signals import stop
from ml_factory.errors import FactoryError
from ml_factory.models.registry import WITH_DATA, build_model, spec_of
from ml_factory.settings import RunSpec
from ml_factory.storage.locks import launched_by_torchrun
from ml_factory.workflows.dataset import Dataset
from ml_factory.workflows.train import training_data


def broadcast_decision(spec: RunSpec, fitting: bool = False) -> bool:
    """Whether a fit begins now: what the first process says, in all of them. Alone, what it says itself."""
    if not launched_by_torchrun() or not spec_of(spec.model).windowed:
        return fitting
    # torch comes with the networks only, and the processes meet where the training's device is chosen.
    settings = {name: value for name, value in dict(spec.settings).items() if name not in ("weights", *WITH_DATA)}
    device = importlib.import_module("ml_factory.training.device").pick(build_model(spec.model, **settings).settings)
    return device.processes.broadcast({"fitting": fitting})["fitting"]


def fit_worker_rank(data: Dataset, spec: RunSpec) -> None:
    """Take part in the fit of the first process, if there is one, and keep nothing of it.

    Raises FactoryError when that process ends before the fit does.
    """
    if not broadcast_decision(spec):
        return
    training = training_data(data, spec)
    stop.listen()  # the first process hears the signal too: it saves, and leaves
    try:
        training.model.fit(*training.train, validation=training.held_out)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("gloo", "NCCL", "peer")):
            raise
        stop.resend_if_requested()
        raise FactoryError(
            "The first process has left this training", got=str(error).splitlines()[0][:200],
            next_step="it says why; start all of them again: they go on from its last checkpoint",
        ) from error  # fmt: skip
    finally:
        stop.unlisten()
