"""Random lives: saves, loads, uploads, faults and deaths in any order, against the ledger of what was acknowledged."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ml_factory.errors import FactoryError
from tests.faults.disk import Killed
from tests.faults.matrix import ERRORS, FULL
from tests.faults.rules import Rule
from tests.faults.world import KEEP, Uploaded, World, check_load, quiet

STRIKES = (*ERRORS, "hang", "drop", "torn", "short", "die")


class Life(RuleBasedStateMachine):
    """One workspace through many processes and machines.

    Held after every step: what was acknowledged last is on the drive, byte for byte, unless its machine was lost; and a
    load on a healthy drive gives it.
    """

    world_type = World

    @initialize(seed=st.integers(0, 9999), uploads=st.sampled_from([0.0, 0.05, 0.3]))
    def begin(self, seed, uploads):
        self.folder, self.hush = tempfile.TemporaryDirectory(), quiet()
        self.hush.__enter__()
        self.world = self.world_type(Path(self.folder.name), {"seed": seed, "uploads": uploads})
        self.faulty, self.filled = False, False

    def teardown(self):
        if hasattr(self, "world"):
            self.world.end()
            self.hush.__exit__(None, None, None)
            self.folder.cleanup()

    def attempt(self, call) -> None:
        """A fault may end the process in the middle of anything."""
        try:
            call()
        except Killed:
            self.world.new_process()
            self.faulty = False
            self.resume()

    @rule()
    def save(self):
        def one_save():
            saved = self.world.save()
            assert saved or self.faulty, "a healthy disk did not take a save"

        self.attempt(one_save)

    @rule()
    def load(self):
        self.attempt(lambda: check_load(self.world, self.faulty))

    @precondition(lambda self: not self.faulty)
    @rule(
        fault=st.sampled_from(STRIKES),
        after=st.integers(0, 80),
        times=st.sampled_from([1, 2, None]),
        path=st.sampled_from(["*", "*.ckpt", "*.json"]),
    )
    def break_something(self, fault, after, times, path):
        ops = ("write",) if fault in ("torn", "drop") else ("read", "write") if fault == "short" else ()
        self.world.drive.faults.add(Rule(fault, ops, path, after, times))
        self.faulty = fault != "short"
        self.filled = self.filled or fault in FULL

    @precondition(lambda self: self.faulty)
    @rule()
    def heal(self):
        self.world.disk.heal()
        self.faulty = False
        self.resume()

    @rule()
    def upload(self):
        self.world.drive.upload_all()

    @rule()
    def the_process_ends(self):
        self.world.new_process()
        self.faulty = False
        self.resume()

    @rule()
    def the_machine_is_lost(self):
        self.world.new_machine()
        self.world.saved_files = {number: self.world.saved_files[number] for number in self.world.alive()}
        self.faulty = False
        self.resume()

    def resume(self):
        """A new process, or one whose disk is back, begins with the newest."""
        self.world.resume()
        newest = max(self.world.alive().values(), default=0)
        assert self.world.step >= newest

    @invariant()
    def nothing_acknowledged_is_lost(self):
        if not hasattr(self, "world"):
            return
        alive = self.world.alive()
        kept = sorted(self.world.saved_files)[-(2 if self.filled else KEEP) :]
        # What is written over is the oldest; a machine that was lost took its own with it.
        assert set(kept) <= set(alive), f"of {kept} only {sorted(alive)} are there"


class UploadedLife(Life):
    """The same over a mount, with a local disk in front of it."""

    world_type = Uploaded


@pytest.mark.parametrize("life", [Life, UploadedLife])
def test_checkpoint_state_machine_random_sequences_keep_acknowledged_saves(life):
    run_state_machine_as_test(
        life,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_fault_world_detects_lost_acknowledged_save(tmp_path):
    with quiet():
        world = World(tmp_path)
        for _ in range(4):
            assert world.save()
        slot = max(path for path in world.drive.files if path.endswith(".ckpt"))
        world.drive.files[slot].data[2000] ^= 1
        assert len(world.alive()) == 3
        with pytest.raises((AssertionError, FactoryError)):
            world.saved_files = {number: observed for number, observed in world.saved_files.items() if number == 4}
            assert world.alive()
        world.end()
