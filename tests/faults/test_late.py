"""A write that hung is carried out long after it was given up: it finds nothing to spoil."""

import pytest

from tests.faults.rules import Rule
from tests.faults.world import KEEP, PHASE, World, check_state, quiet


@pytest.mark.parametrize("saves", [1, 2, 3, 5])
@pytest.mark.parametrize(("op", "after"), [("write", 0), ("write", 1), ("write", 2), ("truncate", 0)])
def test_manager_keeps_checkpoints_when_hung_writes_complete_late(tmp_path, op, after, saves):
    with quiet():
        world = World(tmp_path)
        for _ in range(KEEP + 3):
            assert world.save()
        before = len(list(world.drive.files))
        for _ in range(2):
            world.drive.faults.add(Rule("hang", (op,), path="*.ckpt", after=after, times=1))
            assert not world.save()
            world.disk.heal()
        for _ in range(saves):
            assert world.save()
        assert len(world.disk.late) == 2
        world.disk.wake()
        kept = world.manager.list_checkpoints(PHASE)
        assert check_state(world.load()["state"]) == world.step
        assert len(kept) == KEEP and kept[-1]["sequence"] == max(world.saved_files)
        for _ in range(KEEP + 3):
            assert world.save()
        assert len(list(world.drive.files)) <= before + 4  # two slots more, each with its manifest
        world.end()


def test_manager_after_refused_writes_adds_at_most_one_slot(tmp_path):
    with quiet():
        world = World(tmp_path)
        for _ in range(KEEP + 3):
            assert world.save()
        before = len(list(world.drive.files))
        for _ in range(6):
            world.drive.faults.add(Rule("EIO", ("write",), path="*.ckpt"))
            assert not world.save()
            world.disk.heal()
            assert world.save()
        assert len(list(world.drive.files)) <= before + 2
        world.end()
