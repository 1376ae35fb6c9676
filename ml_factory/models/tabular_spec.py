"""Settings of the tabular models."""

from dataclasses import asdict, dataclass

from ml_factory.hardware import cores
from ml_factory.models.base import check_settings
from ml_factory.models.session_clock_offset import check_clock_offset_settings
from ml_factory.models.tabular_data import CLASS_WEIGHTS

MACHINE_SETTINGS = ("threads", "device")  # a run may resume with others, and is then marked


@dataclass(frozen=True)
class TabularSpec:
    """Settings of every tabular model.

    rounds : trees per class, or steps of the linear fit, at most.
    block : rounds between two possible checkpoints.
    patience : rounds without a better validation loss before stopping, counted across blocks; 0 for never.
    offset_column : input that grows evenly through the session, of the `SessionClockOffset` the model starts from;
        -1 for none.
    offset_bars : bars before the session's end with cells of their own in the offset.
    class_weight : none, or balanced (see `apply_tabular_class_weights`).
    threads : number of threads; 0 for every core.
    """

    rounds: int = 300
    block: int = 10
    l2: float = 1.0
    patience: int = 30
    class_weight: str = "none"
    seed: int = 0
    threads: int = 0
    offset_column: int = -1
    offset_bars: int = 0

    def __post_init__(self):
        check_settings(
            self, rounds="[1, inf)", block="[1, inf)", patience="[0, inf)", threads="[0, inf)", l2="[0, inf)",
            class_weight=CLASS_WEIGHTS,
        )  # fmt: skip
        check_clock_offset_settings(self.offset_column, self.offset_bars)

    def identity(self) -> dict:
        """The settings that make it another run when they change."""
        return {name: value for name, value in asdict(self).items() if name not in MACHINE_SETTINGS}

    @property
    def thread_count(self) -> int:
        """Threads as a number."""
        return self.threads or cores()


@dataclass(frozen=True)
class TabularBoosterSpec(TabularSpec):
    """Settings of all boosters.

    row_sample, column_sample : share drawn for each tree.
    min_leaf : rows a leaf holds at least.
    """

    learning_rate: float = 0.05
    depth: int = 3
    row_sample: float = 0.8
    column_sample: float = 0.8
    min_leaf: float = 20.0

    def __post_init__(self):
        super().__post_init__()
        share = "(0, 1]"
        check_settings(
            self, depth="[1, inf)", min_leaf="[0, inf)", learning_rate=share, row_sample=share, column_sample=share
        )
