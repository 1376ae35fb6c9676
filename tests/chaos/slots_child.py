"""The process that writes slots, with one difference: it may die in the middle of a write, and all others with it."""

import json
import os
from pathlib import Path

from ml_factory.runs import mount_io
from ml_factory.runs.slots import Slots
from ml_factory.runs.storage import Disk
from tests.chaos.death import die, note

ASKED = "ML_FACTORY_CHAOS_CHUNK"
START = mount_io._START.replace("ml_factory.runs.mount_io", "tests.chaos.slots_child")


def serve(channel: str, told: str, parent: str, niceness: str) -> None:
    """As `mount_io.serve`; the n-th write after the first whole checkpoint stops half-way and ends everything."""
    asked = json.loads(os.environ[ASKED])
    whole_write, save = Disk.write, Slots.write
    count = [None]

    def write(self, descriptor, data, offset):
        if count[0] is not None:
            count[0] += 1
            if count[0] == asked["n"]:
                whole_write(self, descriptor, memoryview(data)[: max(1, len(data) // 2)], offset)
                note(Path(asked["diary"]), "killed", event="chunk", n=asked["n"])
                die(int(parent))
        return whole_write(self, descriptor, data, offset)

    def saved(self, *args):
        found = save(self, *args)
        count[0] = count[0] or 0
        return found

    Disk.write, Slots.write = write, saved
    mount_io.serve(channel, told, parent, niceness)
