"""A stand-in for checkpoints that interrupts a fit, for tests of resume."""


class InterruptingPhase:
    """Stand-in for a phase of checkpoints: keeps every state and interrupts the fit after `until` saves."""

    def __init__(self, until: int):
        self.until, self.state = until, None

    def load(self):
        return None if self.state is None else {"state": self.state}

    def due(self):
        return True

    def due_in(self, pause=0.0):
        return 0.0

    def save(self, state, metrics=None, force=False):
        self.state, self.until = dict(state), self.until - 1
        if not self.until:
            raise KeyboardInterrupt
