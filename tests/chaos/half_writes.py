"""Dying in the middle of writing a slot: in the process that trains, or in the one that writes for it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from ml_factory.checkpoints import child_slots
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.slots import Slots
from tests.chaos.death import die, note

CHUNK_VARIABLE = "ML_FACTORY_CHAOS_CHUNK"


def half_writes(n: int, diary: Path, end: Callable[[], None]) -> None:
    """The n-th write after the first whole checkpoint of this process stops half-way and ends everything."""
    whole_write, save, count = Disk.write, Slots.write, [None]

    def write(self, descriptor, data, offset):
        if count[0] is not None:
            count[0] += 1
            if count[0] == n:
                whole_write(self, descriptor, memoryview(data)[: max(1, len(data) // 2)], offset)
                note(diary, "killed", event="chunk", n=n)
                end()
        return whole_write(self, descriptor, data, offset)

    def saved(self, *args):
        found = save(self, *args)
        count[0] = count[0] or 0
        return found

    Disk.write, Slots.write = write, saved


def serve(channel: str, parent: str, observed: str, niceness: str) -> None:
    """As `mount_io.serve`, in a process that may die in the middle of a write, and its parent with it."""
    calls = json.loads(os.environ[CHUNK_VARIABLE])
    half_writes(calls["n"], Path(calls["diary"]), lambda: die(int(parent)))
    child_slots.serve(channel, parent, observed, niceness)
