"""Saves to a real mount that fails: what was acknowledged is loaded by an empty machine, and no call waits in silence.

`pytest -s tests/contract/test_saves_on_mount.py` prints the figures; ML_FACTORY_TEST_SILENCE=20 with the real deadline.
"""

import json
import logging
import os
import time

import numpy as np
import pytest

from ml_factory import CheckpointManager, Workspace
from ml_factory.checkpoints.manager import COPIED
from tests.contract.doors import remotes

FAULTS = ("hang", "disconnect", "late", "drop", "full")


class Waits(logging.Handler):
    """The longest time between two lines, or the ends of a call; and the lines."""

    def __init__(self):
        super().__init__()
        self.longest, self.lines, self._last = 0.0, [], time.monotonic()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.note()

    def note(self):
        now = time.monotonic()
        self.longest, self._last = max(self.longest, now - self._last), now

    def call(self, function, *args, **more):
        self._last = time.monotonic()
        try:
            return function(*args, **more)
        finally:
            self.note()


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_drive_loses_no_acknowledged_save_and_no_call_waits_in_silence(mount, tmp_path, monkeypatch, fault):
    silence = float(os.environ.get("ML_FACTORY_TEST_SILENCE", 1.0))
    monkeypatch.setattr(remotes, "SILENCE_SECONDS", silence)
    place, waits, saved = mount.path / "ws", Waits(), []
    logging.getLogger("ml_factory").addHandler(waits)

    def machine(name: str) -> CheckpointManager:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        for lease in mount.cloud.glob("ws/checkpoints/leases/*.json"):  # its session ended a while ago
            record = json.loads(lease.read_text())
            lease.write_text(json.dumps({**record, "seen": record["seen"] - 1000}))
        return waits.call(lambda: CheckpointManager(Workspace(place).checkpoints, run="train-x"))

    def save(manager: CheckpointManager) -> float:
        state = {"value": len(saved), "a": np.full(250_000, len(saved))}
        began = time.perf_counter()
        saved.append(waits.call(manager.save_checkpoint, "p", state, force=True))
        return time.perf_counter() - began

    try:
        first = machine("one")
        for _ in range(3):
            save(first)
        assert first.wait(60)
        mount.strike(fault)
        blocked = []
        for _ in range(5):
            blocked.append(save(first))
            time.sleep(0.3 * silence)
        acknowledged = [number for number, one in enumerate(saved) if one["status"] == COPIED]
        waits.call(first.close, 3.0)
        mount.heal()
        time.sleep(silence / 4)  # until the first machine asks again
        second = machine("two")
        found = second.phase("p").load()
        print(
            f"\n{fault}: acknowledged {acknowledged}, loaded {found['state']['value']}; a save blocked at most "
            f"{max(blocked):.2f} s, longest wait without a line {waits.longest:.1f} s, {len(waits.lines)} lines"
        )
        for line in waits.lines:
            print("   ", line[:230])
        assert found["state"]["value"] >= max(acknowledged) and (found["state"]["a"] == found["state"]["value"]).all()
        assert max(blocked) < 1.0 and waits.longest < 60
        outages = [line for line in waits.lines if "newest files again" not in line]
        assert len(outages) == (fault != "late")
        second.close(1)
        again = machine("one")  # continues where it was, and brings up what was on this machine alone
        assert again.phase("p").load()["state"]["value"] >= max(acknowledged)
        save(again)
        assert again.wait(60) and saved[-1]["status"] == COPIED
        again.close()
        with machine("three") as last:  # a phase that stays owned keeps its signal handlers
            assert last.phase("p").load()["state"]["value"] == len(saved) - 1
    finally:
        logging.getLogger("ml_factory").removeHandler(waits)
        mount.heal()
