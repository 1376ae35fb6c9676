"""Who owns a phase: the table of what a session finds, and two machines that share a folder."""

import errno
import fcntl
import json

import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError
from tests.contract.doors import (
    STALE_SECONDS,
    WATCH_SECONDS,
    LeaseTakenOverError,
    Mirror,
    PhaseLease,
    acquire_lock_file,
    pack_state,
    release_lock_file,
    write_checkpoint,
)
from tests.contract.doors import lease as leases

NOW = 1_000_000.0
OWN = "that of the lock file"
UNREADABLE = (
    '{"session": "oth', '{"fence": "5"}', "null", "[]", f'{{"fence": 7, "host": "{"x" * 100_000}"}}',
)  # fmt: skip


class Clock:
    """Stands in for `time`; each wait is followed by what other machines do then."""

    def __init__(self, events=()):
        self.seconds, self.events = 0.0, list(events)
        self.time, self.monotonic = lambda: NOW + self.seconds, lambda: self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        for event in [one for one in self.events if one[0] <= self.seconds]:
            self.events.remove(event)
            event[1]()


def record(path, **changed):
    found = {"session": "other", "fence": 3, "beat": 5, "lock": "there 9", "host": "far", "seen": NOW}
    path.write_text(json.dumps({**found, "released": False, **changed}))


@pytest.fixture
def lease(monkeypatch):
    made = []

    def lease_of(path, session="me", events=(), mirror=None):
        monkeypatch.setattr(leases, "time", clock := Clock(events))
        made.append(PhaseLease(path, path.with_suffix(".lock"), "run r, phase p", session, mirror))
        return made[-1], clock

    yield lease_of
    for one in made:
        one.release()


def identity_of_lock(path) -> str:
    """The identity of the lock file of this lease; it is not held."""
    lock = path.with_suffix(".lock")
    identity = acquire_lock_file(lock, "the work")
    release_lock_file(lock)
    return identity


@pytest.mark.parametrize(
    ("found", "saved", "fence", "waited"),
    [
        (None, 0, 1, 0),
        (None, 4, 5, 0),  # the mount lost the lease, and shows a checkpoint
        ({"released": True}, 0, 4, 0),
        ({"released": True}, 9, 10, 0),
        ({"session": "me"}, 0, 3, 0),  # this very session, in another part of it
        ({"lock": OWN}, 0, 4, 0),  # a killed process of this machine
        ({"seen": NOW - STALE_SECONDS - 1}, 0, 4, 0),
        ({}, 0, 4, WATCH_SECONDS),  # killed just now, on another machine
        ({"seen": NOW + 10**6}, 0, 4, WATCH_SECONDS),  # its clock is ahead
        *((text, 0, 1, 0) for text in UNREADABLE),  # on this machine's disk the lock decides
    ],
)
def test_lease_is_taken_at_once_or_after_watching(tmp_path, lease, found, saved, fence, waited):
    path = tmp_path / "lease.json"
    lock = identity_of_lock(path)
    if isinstance(found, str):
        path.write_text(found)
    elif found is not None:
        record(path, **found | ({"lock": lock} if "lock" in found else {}))
    taken, clock = lease(path)
    taken.acquire(lambda: saved)
    assert (taken.fence, clock.seconds, taken.held) == (fence, waited, True)
    stored = json.loads(path.read_text())
    assert (stored["session"], stored["fence"], stored["lock"], stored["released"]) == ("me", fence, lock, False)


def test_lease_that_is_renewed_meanwhile_is_refused_and_one_released_is_taken(tmp_path, lease, monkeypatch):
    path = tmp_path / "lease.json"
    record(path)
    refused, clock = lease(path, events=[(60, lambda: record(path, beat=6))])
    with pytest.raises(CheckpointError, match=r"Another session is working on run r, phase p \[on far\]"):
        refused.acquire(lambda: 0)
    assert clock.seconds == 60 and not refused.held and json.loads(path.read_text())["session"] == "other"
    record(path, lock="")
    taken, clock = lease(path, events=[(30, lambda: record(path, beat=7, released=True))])

    def no_locks(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)  # both disks are without locks, which proves nothing
    taken.acquire(lambda: 0)
    assert clock.seconds == 30 and taken.fence == 4


@pytest.mark.parametrize(
    ("rival", "ends"),
    [
        ({"fence": 5}, True), ({"fence": 4, "session": "zz"}, True), ({"fence": 4, "session": "aa"}, False),
        ({"fence": 3}, False), ({"fence": 5, "released": True}, True),
    ],
)  # fmt: skip
def test_session_with_lower_fence_or_id_stops_writing(tmp_path, lease, rival, ends):
    path = tmp_path / "lease.json"
    record(path, released=True)
    mine, _ = lease(path)
    mine.acquire(lambda: 0)
    record(path, **rival)
    before = path.read_text()
    if ends:
        with pytest.raises(LeaseTakenOverError, match="taken this work over"):
            mine.renew()
        assert path.read_text() == before
    else:
        mine.renew()
        assert json.loads(path.read_text())["session"] == "me"


def test_session_that_finds_a_checkpoint_of_a_later_one_stops_writing(tmp_path):
    with CheckpointManager(tmp_path, run="r") as manager:
        info = manager.save_checkpoint("p", {"value": 1}, force=True)
        manager.wait()
        later = {**info, "sequence": 2, "lease": {"session": "other", "fence": info["lease"]["fence"] + 1}}
        write_checkpoint(tmp_path / "r/p.3.ckpt", later, *pack_state({"value": 2}))
        with pytest.raises(LeaseTakenOverError, match="taken this work over"):
            manager.save_checkpoint("p", {"value": 3}, force=True)
            manager.wait()
            manager.save_checkpoint("p", {"value": 4}, force=True)
        assert manager.load_latest_checkpoint("p")["state"] == {"value": 2}


def test_released_lease_is_not_renewed_by_a_late_heartbeat(tmp_path, lease):
    mine, _ = lease(tmp_path / "lease.json")
    mine.acquire(lambda: 0)
    mine.renew(released=True)
    mine.renew()
    assert json.loads((tmp_path / "lease.json").read_text())["released"] and not mine.held


def test_two_machines_on_one_mount_see_each_others_leases(tmp_path, lease, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path / "drive"))
    one, two = (Mirror(str(tmp_path / "drive/leases"), tmp_path / name) for name in ("one", "two"))
    name = "x.json"
    first, _ = lease(one.folder / name, "first", mirror=one)
    first.acquire(lambda: 0)
    one.wait(30)

    def beat():
        first.renew()
        one.wait(30)

    second, _ = lease(two.folder / name, "second", [(60, beat)], two)
    with pytest.raises(CheckpointError, match="being renewed"):
        second.acquire(lambda: 0)
    later, clock = lease(two.folder / name, "later", mirror=two)  # the first machine is gone
    later.acquire(lambda: 0)
    assert clock.seconds == WATCH_SECONDS and later.fence == 2
    two.wait(30)
    with pytest.raises(LeaseTakenOverError):  # it was only away
        first.renew()
