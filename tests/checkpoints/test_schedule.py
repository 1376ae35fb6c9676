"""Saves come at once, soon while young, then every half hour."""

from ml_factory.checkpoints.schedule import SaveSchedule, SaveTimer


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_save_timer_due_in_predicts_next_due_time():
    """At every second the answer is the one a loop that asks each second then finds, also where the run grows old."""
    clock, observed = Clock(), {}
    timer, began = SaveTimer(1800, SaveSchedule(clock=clock)), clock.now
    for second in range(5300):
        clock.now = began + second
        if timer.due_in() == 0:
            assert {at + left for at, left in observed.items()} <= {second}
            observed = {}
            timer.record_save()
            timer.record_outcome(True)
        observed[second] = timer.due_in()


def test_save_timer_of_refused_saves_is_due_soon_and_stays_young():
    clock = Clock()
    timer = SaveTimer(1800, SaveSchedule(clock=clock))
    for _ in range(6):
        timer.record_save()
        timer.record_outcome(False)
        assert 0 < timer.due_in() <= 10
        clock.now += 1000
    timer.record_save()
    timer.record_outcome(True)
    assert timer.due_in() == 120
