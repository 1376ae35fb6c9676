"""Settings of the guard: what follows from each kind of finding, and the limits of the checks."""

from dataclasses import dataclass, fields

from ml_factory.errors import wrong_field_error

ACTIONS = ("ok", "warn", "abstain", "refuse")  # in order of weight
KINDS = ("stale", "gap", "unit", "tick", "stuck", "range", "drift", "martingale", "calibration")
LONG_HELD = ("unit", "calibration")  # kinds that stay for `long_hold_bars`


@dataclass(frozen=True)
class Finding:
    """One finding of the guard.

    kind : "schema" or one of KINDS
    action : "warn", "abstain" (the answer has no probabilities) or "refuse" (the request is an error)
    message : what, got, wanted, in one sentence
    """

    kind: str
    action: str
    message: str


@dataclass(frozen=True)
class GuardSettings:
    """Action of each kind of finding ("warn", "abstain", "refuse"; "ok": not checked), and limits.

    stale : the newest bar is older than the clock allows, or later than the clock
    gap : minutes are absent while the market is open
    unit : the price jumps as another unit, contract or adjustment would make it
    tick : prices are off the market's tick, where those of training were on it
    stuck : the feed repeats one price
    range : features further outside the range of training than it is wide, or NaN where training never has it
    drift : inputs or probabilities are distributed otherwise than in training (PSI, KS)
    martingale : blocks of bars are stranger than those of training (conformal test martingale)
    calibration : outcomes contradict the predicted probabilities
    stale_minutes : open minutes without a bar before the newest is stale
    gap_minutes : open minutes without a bar that are a gap; None: from the bundle's reference, else the market's hole
    unit_jump : a change of log price between two bars; None: from the reference, else log 2
    stuck_bars : bars at one price; None: from the reference, else 60
    window_bars : bars over which ticks and stuck prices are counted
    hold_bars : bars for which a finding stays after it was last seen
    long_hold_bars : the same for calibration, whose outcomes come late and rarely, and for a jump of unit where the
        warm-up of the features is not known; where it is, the jump is a finding as long as their windows hold it
    drift_scale : factor on the thresholds of drift, martingale and calibration; above 1 fewer alarms
    """

    stale: str = "abstain"
    gap: str = "warn"
    unit: str = "abstain"
    tick: str = "abstain"
    stuck: str = "abstain"
    range: str = "warn"
    drift: str = "warn"
    martingale: str = "warn"
    calibration: str = "warn"
    stale_minutes: int = 5
    gap_minutes: int | None = None
    unit_jump: float | None = None
    stuck_bars: int | None = None
    window_bars: int = 240
    hold_bars: int = 60
    long_hold_bars: int = 1440
    drift_scale: float = 1.0

    def __post_init__(self) -> None:
        for kind in KINDS:
            if getattr(self, kind) not in ACTIONS:
                raise wrong_field_error(self, kind, "Unknown action of the guard", wanted=", ".join(ACTIONS))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in KINDS and value is not None and not 0 < value < 1e9:
                raise wrong_field_error(self, field.name, "A limit of the guard is a positive number", wanted="above 0")


DEFAULT_SETTINGS = GuardSettings()
