"""A fixed part of the fault matrix, and that the matrix can fail."""

from unittest import mock

import pytest

from ml_factory.checkpoints import slots
from tests.faults.matrix import ACTIONS, FAULTS, Fault, Table, cells, operations, run
from tests.faults.world import KEEP, World, quiet


@pytest.mark.parametrize("action", ACTIONS)
def test_fault_matrix_sample_of_action_survives_all_faults(action):
    table = Table()
    for chosen, fault, index in cells(every=23):
        if chosen == action:
            run(table, chosen, fault, index)
    assert not table.failures
    assert sum(table.struck.values()) > 25
    assert table.struck == table.survived


def test_fault_matrix_covers_every_kind_of_file_operation():
    kinds, table = set(), Table()
    eio = Fault("EIO", "EIO")
    for action in ACTIONS:
        for index in (0, *range(1, operations(action), 3)):
            run(table, action, eio, index)
    kinds = {kind for _, kind, _ in table.struck}
    assert kinds >= {"names", "open", "stat", "read", "write", "truncate", "sync", "close", "free"}
    assert not table.failures


def broken_read_container(disk, path, into=None):
    """No look at the hash."""
    found = slots.read_checkpoint_file_header(disk, path)
    if found.fault:
        raise found.fault
    if into is not None:
        file = disk.open(path)
        data = bytearray(found.size)
        disk.read(file, memoryview(data), 0)
        disk.close(file)
        into += data
    return {**found.info, "bytes": found.size, "hash": found.hash}


@pytest.mark.parametrize(
    ("name", "replacement", "fault", "action"),
    [
        ("read_checkpoint_file", broken_read_container, "write dropped", "rotate"),
        ("retained_slots", lambda good, keep: (set(list(good)[:-1]), None), "killed", "rotate"),
    ],
)
def test_fault_matrix_with_broken_slots_code_reports_failures(name, replacement, fault, action):
    [fault] = [one for one in FAULTS if one.name == fault]
    table = Table()
    with mock.patch.object(slots, name, replacement):
        for index in range(operations(action)):
            run(table, action, fault, index)
    assert table.failures


def test_manager_after_thousand_saves_on_drive_stays_within_slot_pool(tmp_path):
    with quiet():
        world = World(tmp_path, {"quota": 90_000})
        for _ in range(1000):
            assert world.save()
        [size] = {len(data) for data, step in world.saved_files.values() if step == 1000}
        assert world.drive.trash == 0
        assert world.drive.peak <= (KEEP + 1) * (size + 2000)
        world.end()
