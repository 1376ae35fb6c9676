"""Saves come at once, soon while young, then every half hour."""

from ml_factory.checkpoints.schedule import SaveTimer


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saves(timer: SaveTimer, clock: Clock, seconds: int) -> list[int]:
    """Return the times at which a loop that checks every second saves."""
    began, moments = clock.now, []
    for second in range(seconds):
        clock.now = began + second
        if timer.due():
            timer.record_save()
            moments.append(second)
    return moments


def test_save_timer_saves_at_once_then_every_two_and_thirty_minutes():
    clock = Clock()
    moments = saves(SaveTimer(1800, 120, clock), clock, 6000)
    assert moments == [*range(0, 1800, 120), 3480, 5280]


def test_save_timer_due_in_predicts_next_due_time():
    """At every second the answer is the one a loop that asks each second then finds, also where the run grows old."""
    clock, observed = Clock(), {}
    timer, began = SaveTimer(1800, 120, clock), clock.now
    for second in range(5300):
        clock.now = began + second
        if timer.due():
            assert timer.due_in() == 0
            assert {at + left for at, left in observed.items()} <= {second}
            observed = {}
            timer.record_save()
        observed[second] = timer.due_in()


def test_save_timer_of_refused_saves_is_due_soon_and_stays_young():
    clock = Clock()
    timer = SaveTimer(1800, 120, clock)
    waits = []
    for _ in range(6):
        timer.record_save()
        timer.record_refused()
        waits.append(timer.due_in())
        clock.now += waits[-1]
    assert waits == [1, 2, 4, 8, 10, 10]
    clock.now += 3600
    timer.record_save()
    timer.record_accepted()
    assert timer.due_in() == 120
