"""Sessions on two machines and one workspace: the living is left alone, the dead is followed, the zombie is fenced."""

import shutil
import threading
import time
from functools import partial

import numpy as np
import pytest

from ml_factory.checkpoints import leases
from ml_factory.checkpoints.leases import EXPIRY_SECONDS, LeaseHeartbeat, LeaseHolder, LeaseTakenOverError
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool, SlotWriterId
from ml_factory.checkpoints.slots import Slots
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.errors import CheckpointError, WorkspaceError
from ml_factory.storage.locks import HeldLock
from ml_factory.storage.serialization import deserialize_state, serialize_state

UNIT = CheckpointUnit("run", "train_lstm")


class Machine:
    """One machine's clocks, name and access to the shared folder.

    now : wall-clock time.
    waited : seconds slept, the monotonic clock.
    clock_synchronized : the wall clock is kept by NTP.
    """

    def __init__(self, monkeypatch, folder, name: str, now: float = 1000.0):
        self.patch, self.folder, self.name, self.now = monkeypatch, folder, name, now
        self.while_waiting, self.waited, self.clock_synchronized, self.boot = lambda: None, 0.0, True, f"boot of {name}"
        self.slots = Slots(SlotPool(folder), SlotWriterId(name))

    def lease_holder(self) -> LeaseHolder:
        self.sits_here()
        clocks = {"now": lambda: self.now, "clock": lambda: self.waited, "sleep": self._sleep}
        return LeaseHolder(UNIT, self.name, self.slots, **clocks)

    def sits_here(self) -> None:
        self.patch.setattr(leases, "boot_id", lambda: self.boot)
        self.patch.setattr(leases.socket, "gethostname", lambda: self.name)
        self.patch.setattr(leases, "clock_is_synchronized", lambda: self.clock_synchronized)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.waited += seconds
        self.while_waiting()
        self.sits_here()


@pytest.fixture
def machines(monkeypatch, tmp_path):
    return [Machine(monkeypatch, tmp_path, name) for name in ("one", "two")]


def test_lease_acquire_by_same_session_keeps_fence_1(machines):
    one, _ = machines
    holder = one.lease_holder()
    holder.acquire()
    assert holder.lease == SlotWriterId("one", 1)
    again = one.lease_holder()
    again.acquire()
    assert again.lease == SlotWriterId("one", 1)


def test_lease_acquire_of_unit_held_by_live_session_raises(machines):
    one, two = machines
    held = one.lease_holder()
    held.acquire()

    def renews():
        one.now = two.now
        one.sits_here()
        held.renew()

    two.while_waiting = renews
    with pytest.raises(CheckpointError, match="Another session is working"):
        two.lease_holder().acquire()
    assert two.waited <= leases.POLL_SECONDS


@pytest.mark.parametrize("whose", ["one", "two"])
@pytest.mark.parametrize("skew", [-7200, -200, -170, 170, 200, 7200])
def test_lease_acquire_of_live_session_with_clock_skew_raises(machines, skew, whose):
    """The session renews once a minute of its own; one clock of the two is wrong and not synchronized."""
    one, two = machines
    one.now, one.clock_synchronized, two.clock_synchronized = one.now + skew, whose != "one", whose != "two"
    held = one.lease_holder()
    held.acquire()

    def passes():
        if two.waited >= one.waited + leases.RENEW_SECONDS:
            one.waited, one.now = two.waited, one.now + leases.RENEW_SECONDS
            one.sits_here()
            held.renew()

    two.while_waiting = passes
    with pytest.raises(CheckpointError, match="Another session is working"):
        two.lease_holder().acquire()
    assert two.waited <= leases.RENEW_SECONDS + leases.POLL_SECONDS
    assert two.slots.read_lease(UNIT)["session"] == "one"


@pytest.mark.parametrize("skew", [-7200, -200, 0, 200, 7200])
def test_lease_of_dead_session_with_unsynchronized_clock_is_taken_after_expiry(machines, skew):
    one, two = machines
    one.now, one.clock_synchronized = one.now + skew, False
    one.lease_holder().acquire()
    holder = two.lease_holder()
    holder.acquire()
    assert holder.lease == SlotWriterId("two", 2) and two.waited == pytest.approx(EXPIRY_SECONDS)


@pytest.mark.parametrize(
    ("boots", "synchronized", "silent", "waits"),
    [
        ("ab", False, 86401, 0),
        ("ab", True, EXPIRY_SECONDS + 1, 0),
        ("ab", True, 60, 120),
        ("aa", True, 3600, EXPIRY_SECONDS),
        ("aa", False, 3600, EXPIRY_SECONDS),
    ],
    ids=["a day ago", "long ago", "just now", "one kernel", "one kernel, not synchronized"],
)
def test_lease_waits_only_remaining_expiry_where_age_is_unambiguous(machines, boots, synchronized, silent, waits):
    """Two containers of one kernel have one clock report, and one of them may have another clock."""
    one, two = machines
    for machine, machine.boot in zip(machines, boots, strict=True):
        machine.clock_synchronized = synchronized
    one.lease_holder().acquire()
    two.now += silent
    two.lease_holder().acquire()
    assert two.waited == pytest.approx(waits)


def test_lease_renewed_after_clock_set_back_counts_as_live(machines):
    one, two = machines
    held = one.lease_holder()
    held.acquire()

    def renews():
        one.now = 10.0  # its clock was wrong, and is right now
        one.sits_here()
        held.renew()

    two.while_waiting = renews
    with pytest.raises(CheckpointError, match="Another session is working"):
        two.lease_holder().acquire()


def test_clock_is_synchronized_follows_adjtimex_status(monkeypatch):
    class Kernel:
        def __init__(self, state, status, name):
            self.state, self.status = state, status

        def adjtimex(self, observed):
            leases._TIMEX.pack_into(observed, 0, 0, 0, 0, 16_000, 16_000, self.status)
            return self.state

    for state, status, kept in ((0, 0x2001, True), (5, 0x40, False), (0, 0x40, False), (-1, 0, False)):
        monkeypatch.setattr(leases.ctypes, "CDLL", partial(Kernel, state, status))
        assert leases.clock_is_synchronized() is kept
    monkeypatch.setattr(leases.ctypes, "CDLL", lambda name: object())  # a system that has no such call
    assert leases.clock_is_synchronized() is False
    monkeypatch.undo()
    assert leases.clock_is_synchronized() in (True, False)


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_bytes(b"{"), lambda path: path.unlink()], ids=["torn", "gone"]
)
def test_lease_unreadable_while_watched_expires(machines, spoil):
    one, two = machines
    one.lease_holder().acquire()
    two.now, two.while_waiting = 1010.0, lambda: [spoil(path) for path in (one.folder / "leases").iterdir()]
    two.lease_holder().acquire()
    assert two.now == pytest.approx(1000 + EXPIRY_SECONDS)


def test_lease_with_clock_ahead_is_taken_after_expiry_seconds(machines):
    one, two = machines
    one.now = 1000 + 86400.0
    one.lease_holder().acquire()
    holder = two.lease_holder()
    holder.acquire()
    assert holder.lease.fence == 2 and two.now == pytest.approx(1000 + EXPIRY_SECONDS)


class Words:
    """A tier that records what is written; its first answer waits for `go`."""

    def __init__(self):
        self.words, self.go, self._called = [], threading.Event(), False

    def read_lease(self, unit):
        first, self._called = not self._called, True
        if first:
            self.go.wait()
        return {}

    def list_unverified(self, unit):
        return []

    def renew(self, unit, observed):
        self.words.append(observed)


def test_lease_renew_after_release_keeps_lease_released():
    here = Words()
    holder = LeaseHolder(UNIT, "one", here)
    holder.held = True
    beat = threading.Thread(target=holder.renew)
    beat.start()
    while not here._called:
        time.sleep(0.001)
    lets_go = threading.Thread(target=holder.renew, args=(True,))
    lets_go.start()
    lets_go.join(0.2)
    here.go.set()
    beat.join()
    lets_go.join()
    assert here.words[-1]["released"] and not holder.held


def test_lease_renewals_for_hanging_mount_are_merged_into_newest():
    here, mount, jobs = Words(), Words(), []
    here.go.set()
    mount.go.set()
    clock = iter(range(10))
    holder = LeaseHolder(UNIT, "one", here, mount, jobs.append, now=lambda: float(next(clock)))
    holder.acquire(query_mount=False)
    for _ in range(4):
        holder.renew()
    assert len(jobs) == 1 and not mount.words
    jobs.pop()()
    assert [word["seen"] for word in mount.words] == [here.words[-1]["seen"]]
    holder.renew(released=True)
    jobs.pop()()
    assert mount.words[-1]["released"]


@pytest.fixture
def unqueried(machines, tmp_path):
    """The lease of a session on machine two that never loaded; the mount's folder is machine one's."""
    _, two = machines
    mount, two.slots = two.slots, Slots(SlotPool(tmp_path / "local"), SlotWriterId("two"))
    two.slots.renew(UNIT, {"session": "before", "fence": 5, "seen": two.now, "released": True})

    def acquire() -> LeaseHolder:
        two.sits_here()
        clocks = {"now": lambda: two.now, "clock": lambda: two.waited}
        holder = LeaseHolder(UNIT, "two", two.slots, mount, **clocks, sleep=lambda seconds: pytest.fail("waits"))
        holder.acquire(query_mount=False)
        return holder

    return acquire


def test_session_that_never_loaded_does_not_outrank_live_session_on_mount(machines, unqueried):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    one.slots.write(UNIT, 3, {"lease": held.lease.to_dict(), "metrics": {}}, b"1")
    newcomer = unqueried()
    assert newcomer.lease.fence == 6 and one.slots.read_lease(UNIT)["session"] == "one"
    with pytest.raises(WorkspaceError, match="nothing is written there while its lease is watched, for 180 s more"):
        newcomer.mount_fence()
    one.sits_here()
    held.renew()
    two.sits_here()
    for _ in range(2):
        with pytest.raises(LeaseTakenOverError, match="Another session is working"):
            newcomer.mount_fence()
        newcomer.renew()
    newcomer.renew(released=True)
    assert one.slots.read_lease(UNIT)["session"] == "one"
    one.slots.write(UNIT, 3, {"lease": held.lease.to_dict(), "metrics": {}}, b"2")


@pytest.mark.parametrize("end", ["released", "silent", "long ago"])
def test_session_that_never_loaded_copies_to_mount_once_other_session_has_ended(machines, unqueried, end):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    held.lease = SlotWriterId("one", 8)
    held.renew()
    two.now += 7200 if end == "long ago" else 0
    newcomer = unqueried()
    if end != "long ago":
        with pytest.raises(WorkspaceError):
            newcomer.mount_fence()
        if end == "released":
            held.renew(released=True)
        two.waited += EXPIRY_SECONDS if end == "silent" else 1.0
    assert newcomer.mount_fence() == newcomer.lease.fence == 9
    newcomer.renew()
    assert one.slots.read_lease(UNIT)["session"] == "two"


def test_mount_that_did_not_answer_is_checked_before_first_copy(machines, unqueried, monkeypatch):
    one, _ = machines
    one.lease_holder().acquire()
    newcomer = unqueried()
    newcomer.renew(released=True)
    answers = Slots.list_unverified

    def silent(slots, unit):
        if slots is newcomer._mount:
            raise WorkspaceError("does not answer")
        return answers(slots, unit)

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "list_unverified", silent)
        patch.setattr(Slots, "read_lease", lambda slots, unit: {})
        newcomer.acquire()
        with pytest.raises(WorkspaceError, match="does not answer"):
            newcomer.mount_fence()
    with pytest.raises(WorkspaceError, match="Another session may still work"):
        newcomer.mount_fence()


def test_heartbeat_restarts_after_stop():
    beats = threading.Semaphore(0)
    heart = LeaseHeartbeat(lambda: beats.release() or [], seconds=0.001)
    for _ in range(2):
        heart.start()
        assert beats.acquire(timeout=30)
        heart.stop()
        heart._thread.join()
        while beats.acquire(blocking=False):
            pass


def test_lease_silent_beyond_expiry_is_taken_at_once(machines):
    one, two = machines
    one.lease_holder().acquire()
    two.now = 1000 + EXPIRY_SECONDS + 1
    holder = two.lease_holder()
    holder.acquire()
    assert holder.lease == SlotWriterId("two", 2) and two.now == 1000 + EXPIRY_SECONDS + 1


def test_lease_of_session_just_killed_is_taken_after_expiry_and_warns(machines, caplog):
    one, two = machines
    one.lease_holder().acquire()
    two.now = 1040.0
    holder = two.lease_holder()
    holder.acquire()
    assert holder.lease.fence == 2 and two.now == pytest.approx(1000 + EXPIRY_SECONDS)
    assert "waiting up to 140 s" in caplog.text


def test_lease_released_is_taken_without_waiting(machines):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    held.renew(released=True)
    holder = two.lease_holder()
    holder.acquire()
    assert holder.lease.fence == 2 and two.waited == 0


@pytest.mark.parametrize(
    ("lock", "waits"),
    [
        (HeldLock("file two", frozenset({"file zero", "file one"})), 0),
        (HeldLock("file two", frozenset({"copied one"})), EXPIRY_SECONDS),  # a disk was copied with its lock files
        (HeldLock("file two"), EXPIRY_SECONDS),  # a container with a local disk of its own
        (None, EXPIRY_SECONDS),  # a file system without locks
    ],
)
def test_lease_of_one_host_name_and_kernel_is_taken_at_once_only_where_lock_proves_end(machines, lock, waits):
    one, two = machines
    one.boot = two.boot
    one.lease_holder().acquire(lock=HeldLock("file one"))
    one.name = two.name
    holder = two.lease_holder()
    holder.acquire(lock=lock)
    assert holder.lease == SlotWriterId("two", 2) and two.waited == pytest.approx(waits)


def test_lease_without_lock_is_watched_by_session_that_has_a_lock(machines):
    one, two = machines
    one.boot = two.boot
    one.lease_holder().acquire(lock=HeldLock(""))  # its disk refused the signature
    two.lease_holder().acquire(lock=HeldLock("file two", frozenset({"", "file one"})))
    assert two.waited == pytest.approx(EXPIRY_SECONDS)


def test_superseded_session_cannot_write_slots_or_retake_lease(machines):
    one, two = machines
    zombie = one.lease_holder()
    zombie.acquire()
    one.slots.write(UNIT, 3, {"lease": zombie.lease.to_dict(), "metrics": {}}, b"1")
    two.now = 5000.0
    holder = two.lease_holder()
    holder.acquire()
    # before the new session has saved anything the lease alone tells
    with pytest.raises(LeaseTakenOverError, match="taken this work over"):
        one.slots.write(UNIT, 3, {"lease": zombie.lease.to_dict(), "metrics": {}}, b"2")
    two.slots.write(UNIT, 3, {"lease": holder.lease.to_dict(), "metrics": {}}, b"3")
    zombie.renew()
    assert two.slots.read_lease(UNIT)["session"] == "two"
    for path in (one.folder / "leases").iterdir():
        path.unlink()  # where leases are lost, the checkpoints tell
    with pytest.raises(LeaseTakenOverError, match="fence 1, wanted 2"):
        one.slots.write(UNIT, 3, {"lease": zombie.lease.to_dict(), "metrics": {}}, b"4")


def test_slots_of_two_sessions_with_equal_fence_accept_only_later_session(machines):
    """A mount shows leases late: both have taken fence 1 before either saw the other."""
    one, two = machines
    first = one.lease_holder()
    first.acquire()
    lease = next((one.folder / "leases").iterdir())
    lease.unlink()  # not shown yet
    second = two.lease_holder()
    second.acquire()
    assert first.lease.fence == second.lease.fence == 1
    for _ in range(2):
        second.renew()
        first.renew()
        assert two.slots.read_lease(UNIT)["session"] == "two"
        with pytest.raises(LeaseTakenOverError):
            one.slots.write(UNIT, 3, {"lease": first.lease.to_dict(), "metrics": {}}, b"1")
        two.slots.write(UNIT, 3, {"lease": second.lease.to_dict(), "metrics": {}}, b"2")
    lease.unlink()  # the checkpoints alone tell it, too
    with pytest.raises(LeaseTakenOverError):
        one.slots.write(UNIT, 3, {"lease": first.lease.to_dict(), "metrics": {}}, b"1")


def test_session_that_has_saved_keeps_unit_from_newcomer_of_equal_fence(machines):
    """The newcomer's mount showed neither lease nor checkpoint; it is refused before it writes, whatever its name."""
    folder = machines[0].folder
    for first, second in (machines, machines[::-1]):
        for path in [*(folder / "leases").glob("*"), *folder.glob("slot-*")]:
            path.unlink()
        incumbent = first.lease_holder()
        incumbent.acquire()
        lease = next((folder / "leases").iterdir())
        shown = lease.read_bytes()
        lease.unlink()
        newcomer = second.lease_holder()
        newcomer.acquire()
        assert incumbent.lease.fence == newcomer.lease.fence == 1
        lease.write_bytes(shown)
        first.slots.write(UNIT, 3, {"lease": incumbent.lease.to_dict(), "metrics": {}}, b"1")
        newcomer.renew()
        assert first.slots.read_lease(UNIT)["session"] == first.name  # a third session must see the one that works
        with pytest.raises(LeaseTakenOverError):
            second.slots.write(UNIT, 3, {"lease": newcomer.lease.to_dict(), "metrics": {}}, b"2")
        lease.write_bytes(shown.replace(f'"{first.name}"'.encode(), f'"{second.name}"'.encode()))  # a late upload
        incumbent.renew()
        assert first.slots.read_lease(UNIT)["session"] == first.name
        newcomer.renew(released=True)
        assert first.slots.read_lease(UNIT)["session"] == first.name
        first.slots.write(UNIT, 3, {"lease": incumbent.lease.to_dict(), "metrics": {}}, b"3")


@pytest.mark.parametrize("newcomer", ["a", "z"])
def test_newcomer_of_equal_fence_is_refused_by_checkpoints_alone(machines, newcomer):
    one, two = machines
    one.slots.write(UNIT, 3, {"lease": {"session": "one", "fence": 1}, "metrics": {}}, b"1")
    with pytest.raises(LeaseTakenOverError):
        two.slots.write(UNIT, 3, {"lease": {"session": newcomer, "fence": 1}, "metrics": {}}, b"2")
    one.slots.write(UNIT, 3, {"lease": {"session": "one", "fence": 1}, "metrics": {}}, b"3")


@pytest.mark.parametrize("appears", [True, False])
def test_checkpoint_with_higher_fence_than_released_lease_is_watched_for(machines, appears):
    """The mount still shows the lease of an earlier session: the one that saved since may be alive."""
    one, two = machines
    one.slots.renew(UNIT, {"session": "before", "fence": 1, "seen": 900.0, "released": True})
    stale = next((one.folder / "leases").iterdir())
    shown = stale.read_bytes()
    held = one.lease_holder()
    held.acquire()
    one.slots.write(UNIT, 3, {"lease": held.lease.to_dict(), "metrics": {}}, b"1")
    late = stale.read_bytes()
    stale.write_bytes(shown)
    holder = two.lease_holder()
    two.while_waiting = lambda: stale.write_bytes(late) if appears and two.waited >= 60 else None
    if appears:
        with pytest.raises(CheckpointError, match="Another session is working"):
            holder.acquire()
        assert one.slots.read_lease(UNIT)["session"] == "one"
    else:
        holder.acquire()
        assert holder.lease.fence == 3 and two.waited == pytest.approx(EXPIRY_SECONDS)


def test_slots_of_two_sessions_that_saved_with_equal_fence_accept_only_one(machines, tmp_path):
    """Each saved before it saw the other."""
    one, two = machines
    elsewhere = Slots(SlotPool(tmp_path / "elsewhere"), SlotWriterId("two"))
    for name, slots in (("one", one.slots), ("two", elsewhere)):
        slots.write(UNIT, 3, {"lease": {"session": name, "fence": 1}, "metrics": {}}, b"1")
    for path in elsewhere.pool.folder.glob("slot-*"):
        shutil.copy(path, one.folder)
    with pytest.raises(LeaseTakenOverError):
        one.slots.write(UNIT, 3, {"lease": {"session": "one", "fence": 1}, "metrics": {}}, b"2")
    two.slots.write(UNIT, 3, {"lease": {"session": "two", "fence": 1}, "metrics": {}}, b"3")


def test_slots_latest_valid_prefers_higher_fence_over_sequence(machines):
    one, two = machines
    for number in range(4):
        one.slots.write(UNIT, 3, {"lease": {"session": "one", "fence": 1}, "metrics": {}}, b"old %d" % number)
    elsewhere = Slots(SlotPool(two.folder.with_name("elsewhere")), SlotWriterId("two"))
    saved = elsewhere.write(
        UNIT, 3, {"lease": {"session": "two", "fence": 2}, "metrics": {}}, serialize_state({"x": 2})
    )
    assert saved["sequence"] == 1
    one.slots.copy_from_pool(UNIT, 3, saved["path"])
    info, state, _ = one.slots.load_latest_valid(UNIT, deserialize_state)
    assert state == {"x": 2} and info["lease"]["fence"] == 2


def test_manager_superseded_by_other_session_raises_at_next_save(tmp_path, monkeypatch):
    state = {"weights": np.zeros(1000)}
    with CheckpointManager(
        tmp_path, run="run", tiers=StorageTiers(lease=SlotWriterId("first")), background=False
    ) as first:
        assert first.phase("p").load() is None
        first.save_checkpoint("p", state, force=True)
        with CheckpointManager(
            tmp_path, run="run", tiers=StorageTiers(lease=SlotWriterId("second")), background=False
        ) as second:
            next((tmp_path / "leases").iterdir()).unlink()  # as on a mount that does not show it yet
            second.phase("p").lease_holder.acquire()
            assert second.save_checkpoint("p", state, force=True)["lease"] == {"session": "second", "fence": 2}
            with pytest.raises(LeaseTakenOverError):
                first.save_checkpoint("p", state, force=True)
            assert first.phase("p").due()
            assert first.save_checkpoint("q", state, force=True)["lease"]["fence"] == 1  # other work goes on in peace
        assert first.phase("p").load()["lease"]["session"] == "second"  # which is gone now
        assert first.save_checkpoint("p", state, force=True)["lease"] == {"session": "first", "fence": 3}


def test_lease_acquire_on_disk_refusing_leases_succeeds(machines, monkeypatch):
    one, _ = machines

    def refuse(*given):
        raise WorkspaceError("full")

    monkeypatch.setattr(one.slots, "renew", refuse)
    monkeypatch.setattr(one.slots, "read_lease", refuse)
    holder = one.lease_holder()
    holder.acquire()
    assert holder.held and holder.lease.fence == 1


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"fence": "7", "seen": 1}', b'{"fence": 7}', b"\xff"])
def test_read_lease_of_torn_file_is_unreadable_and_without_file_empty(machines, text):
    one, _ = machines
    assert one.slots.read_lease(UNIT) == {}
    one.lease_holder().acquire()
    lease_file(one).write_bytes(text)
    assert one.slots.read_lease(UNIT) == leases.UNREADABLE_LEASE


def lease_file(machine: Machine):
    (path,) = (machine.folder / "leases").iterdir()
    return path


@pytest.mark.parametrize("saves", [False, True])
def test_lease_acquire_of_unreadable_lease_of_live_session_raises(machines, saves):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    if saves:
        one.slots.write(UNIT, 3, {"lease": held.lease.to_dict(), "metrics": {}}, b"1")
    lease_file(one).write_bytes(b"{")

    def renews():
        one.now = two.now
        one.sits_here()
        held.renew()

    two.while_waiting = renews
    with pytest.raises(CheckpointError, match="Another session is working"):
        two.lease_holder().acquire()
    assert two.waited <= leases.POLL_SECONDS


def test_lease_acquire_of_unreadable_lease_of_dead_session_waits_for_expiry(machines):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    one.slots.write(UNIT, 3, {"lease": held.lease.to_dict(), "metrics": {}}, b"1")
    lease_file(one).write_bytes(b"")
    holder = two.lease_holder()
    holder.acquire()
    assert two.waited == pytest.approx(EXPIRY_SECONDS) and holder.lease == SlotWriterId("two", 2)


def test_lease_acquire_of_lease_that_becomes_readable_and_is_released_waits_no_longer(machines):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    lease_file(one).write_bytes(b"{")

    def releases():
        one.sits_here()
        held.renew(released=True)

    two.while_waiting = releases
    two.lease_holder().acquire()
    assert two.waited <= leases.POLL_SECONDS


def test_lease_acquire_of_unreadable_lease_on_local_disk_under_own_lock_waits_not(machines):
    one, two = machines
    held = one.lease_holder()
    held.acquire()
    one.slots.write(UNIT, 3, {"lease": held.lease.to_dict(), "metrics": {}}, b"1")
    lease_file(one).write_bytes(b"{")
    holder = two.lease_holder()
    holder.acquire(lock=HeldLock("holder", frozenset()))
    assert two.waited == 0 and holder.lease.fence == 2


def test_session_that_never_loaded_copies_no_checkpoint_while_lease_on_mount_is_unreadable(machines, unqueried):
    one, two = machines
    one.lease_holder().acquire()
    lease_file(one).write_bytes(b"{")
    holder = unqueried()
    with pytest.raises(WorkspaceError, match="may still work"):
        holder.mount_fence()
    two.waited += EXPIRY_SECONDS
    assert holder.mount_fence() >= 1


@pytest.mark.parametrize("renews", [False, True])
def test_lease_acquire_watches_unreadable_lease_of_mount_in_spite_of_released_one_here(machines, tmp_path, renews):
    """A session that once finished this phase here left a released lease, which says nothing of the mount's."""
    one, two = machines
    mount, local = two.slots, Slots(SlotPool(tmp_path / "local"), SlotWriterId("two"))
    local.renew(UNIT, {"session": "before", "fence": 3, "beat": 10, "seen": 900.0, "released": True})
    held = one.lease_holder()
    held.acquire()
    lease_file(one).write_bytes(b"{")

    def passes():
        if renews and two.waited >= 60:
            one.sits_here()
            held.renew()

    two.while_waiting = passes
    two.sits_here()
    clocks = {"now": lambda: two.now, "clock": lambda: two.waited, "sleep": two._sleep}
    holder = LeaseHolder(UNIT, "two", local, mount, **clocks)
    if renews:
        with pytest.raises(CheckpointError, match="Another session is working"):
            holder.acquire()
    else:
        holder.acquire()
    assert two.waited == pytest.approx(60 if renews else EXPIRY_SECONDS)
