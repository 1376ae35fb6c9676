"""Alarms of the guard: from single events to states with a beginning, a hold and an end."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import NamedTuple

from ml_factory.inference.guard.settings import ACTIONS, KINDS, LONG_HELD, Finding, GuardSettings

NEVER = 2**62  # a bar that no feed reaches


class Event(NamedTuple):
    """A check that found something at a bar.

    bar : number of the bar, from 0
    check : the kind, or kind:detail
    message : what, got, wanted
    state : "found", for the bars that its kind is held; "begun", until an "ended" one
    """

    bar: int
    check: str
    message: str
    state: str = "found"


@dataclass
class Alarm:
    """The state of one check. Its onset is the first bar of an uninterrupted state of alarm.

    last : bar of its last event
    onset : bar at which its latest alarm began
    count : onsets so far
    message : of its last event
    until : first bar at which it is over
    """

    last: int
    onset: int
    count: int
    message: str
    until: int


class Alarms:
    """States of all checks over the bars of one feed.

    A check is in alarm from a bar at which it finds something until `hold_bars` bars after it last did, or until the
    event that ends it.
    """

    def __init__(self, settings: GuardSettings):
        self._settings, self._alarms = settings, dict[str, Alarm]()

    def add(self, event: Event) -> None:
        """Add an event; events come in the order of bars."""
        alarm = self._alarms.get(event.check)
        if event.state == "ended":
            if alarm is not None:
                alarm.until = min(alarm.until, event.bar)
            return
        until = NEVER if event.state == "begun" else event.bar + self._hold(event.check)
        if alarm is None:
            self._alarms[event.check] = Alarm(event.bar, event.bar, 1, event.message, until)
            return
        if not _active(alarm, event.bar):
            alarm.onset, alarm.count = event.bar, alarm.count + 1
        alarm.last, alarm.message, alarm.until = event.bar, event.message, until

    def findings(self, bar: int) -> list[Finding]:
        """Return the findings in force at a bar, the weightiest first."""
        found = [
            Finding(kind_of(check), getattr(self._settings, kind_of(check)), alarm.message)
            for check, alarm in self._alarms.items() if _active(alarm, bar)
        ]  # fmt: skip
        return sorted(found, key=lambda one: (-ACTIONS.index(one.action), KINDS.index(one.kind)))

    def answers(self, events: Iterable[Event], bars: Iterable[int], extra: Iterable[Finding] = ()) -> list[tuple]:
        """Add events, and return (action, reason) for each of these rising bars, as it stood after that bar."""
        waiting, extra, out = sorted(events, key=itemgetter(0)), list(extra), []
        place = 0
        for bar in bars:
            while place < len(waiting) and waiting[place].bar <= bar:
                self.add(waiting[place])
                place += 1
            out.append(action_and_reason(self.findings(bar) + extra))
        for event in waiting[place:]:
            self.add(event)
        return out

    def status(self, bar: int) -> dict:
        """Return for each kind its action, state, number of onsets and last finding, as JSON values."""
        rows = {}
        for kind in KINDS:
            own = [(check, alarm) for check, alarm in self._alarms.items() if kind_of(check) == kind]
            active = any(_active(alarm, bar) for _, alarm in own)
            latest = max(own, key=lambda one: one[1].last, default=(None, None))[1]
            rows[kind] = {
                "action": getattr(self._settings, kind), "state": "alarm" if active else "ok",
                "onsets": sum(alarm.count for _, alarm in own), "last": latest.message if latest else "",
                "last_bar": latest.last if latest else None,
            }  # fmt: skip
        return rows

    def get_state(self) -> dict:
        return {check: asdict(alarm) for check, alarm in self._alarms.items()}

    def load_state(self, state: Mapping) -> None:
        self._alarms = {
            str(check): Alarm(
                int(one["last"]), int(one["onset"]), int(one["count"]), str(one["message"]),
                int(one.get("until", int(one["last"]) + self._hold(str(check)))),  # older states have none
            )
            for check, one in state.items() if kind_of(str(check)) in KINDS
        }  # fmt: skip

    def _hold(self, check: str) -> int:
        return self._settings.long_hold_bars if kind_of(check) in LONG_HELD else self._settings.hold_bars


def _active(alarm: Alarm, bar: int) -> bool:
    return alarm.last <= bar < alarm.until


def kind_of(check: str) -> str:
    """Return the kind of a check such as "drift:volume"."""
    return check.partition(":")[0]


def action_and_reason(findings: Iterable[Finding]) -> tuple[str, str]:
    """Return the weightiest action and all messages."""
    findings = [one for one in findings if one.action != "ok"]
    action = ACTIONS[max((ACTIONS.index(one.action) for one in findings), default=0)]
    return action, "; ".join(one.message for one in findings)
