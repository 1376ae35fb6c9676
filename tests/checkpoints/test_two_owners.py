"""Two owners of one run, in real namespaces: containers with processes, host names and local disks of their own.

All containers of one machine have one kernel, thus one boot id; two of them may have one host name, and process 1 in
each. Each session's clock is right, an hour ahead or an hour behind.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]
HOUR = 3600
EXPIRY = 2.5  # seconds that a lease must stay unchanged, in place of three minutes
# A session: it loads, or begins without; prints what it found, or why it was refused; then saves each number it reads.
SESSION = """
import json, sys, time
spec, clock = json.loads(sys.argv[1]), time.time
time.time = lambda: clock() + spec["ahead"]
from ml_factory.checkpoints import leases
leases.EXPIRY_SECONDS, leases.POLL_SECONDS = spec["expiry"], 0.1
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import CheckpointError
from ml_factory.storage.serialization import deserialize_state

def report(**fields):
    print(json.dumps(fields), flush=True)

manager = CheckpointManager(spec["folder"], run="r")
manager.store.heartbeat._seconds = 0.2
phase, began = manager.phase("p"), time.monotonic()
try:
    found = phase.load() if spec["load"] else None
    report(found=found and found["state"]["value"], fence=phase.lease_holder.lease.fence,
           waited=time.monotonic() - began)
    for line in sys.stdin:
        saved = phase.save({"value": int(line)}, force=True)
        report(saved=int(line) if saved and manager.wait(60) else None)
except CheckpointError as error:
    report(refused=str(error), kept=manager.store.home.load_latest_valid(phase.unit, deserialize_state)[1])
    sys.stdin.read()
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    """Skip where this machine gives its users no namespaces."""
    try:
        tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no program `unshare`")
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")


@pytest.fixture
def container(tmp_path):
    """Start a session in a container: container(name, ahead=0, private=False, setup="", expiry=EXPIRY, load=True).

    private : its local disk is its own, and the checkpoints are on a mount that it shares; else it shares both.
    setup : shell commands that run in the container before.
    """
    started = []

    def start(name, ahead=0, private=False, setup="", expiry=EXPIRY, load=True) -> "Container":
        spec = {"folder": str(tmp_path / "drive"), "ahead": ahead, "expiry": expiry, "load": load}
        started.append(Container(tmp_path, name, private, setup, spec))
        return started[-1]

    yield start
    for one in started:
        one.kill()


class Container:
    """One session in a container."""

    def __init__(self, folder: Path, name: str, private: bool, setup: str, spec: dict):
        local = folder / "local"
        local.mkdir(exist_ok=True)
        disk = f"mount -t tmpfs none {local} && " if private else ""
        script = f'{disk}hostname {name} && {setup or "true"} && exec "$0" -c "$1" "$2"'
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(local)}
        environment["ML_FACTORY_MOUNTS"] = spec["folder"] if private else ""
        self.process = subprocess.Popen(
            [*UNSHARE, "sh", "-c", script, sys.executable, SESSION, json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the session ended"
        return json.loads(line)

    def save(self, value: int) -> dict:
        self.process.stdin.write(f"{value}\n")
        self.process.stdin.flush()
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the session, which is the first process in its container."""
        parent = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        os.kill(int(parent.read_text().split()[0]), number)

    def kill(self) -> None:
        """End it as a machine ends: nothing is released."""
        if self.process.returncode is not None:
            return
        self.process.kill()
        with self.process:
            self.process.stdout.read()  # ends with the last process in the container


def state_of(drive: Path) -> tuple[dict[str, bytes], list[tuple]]:
    """Return (content of all slots and manifests, (fence, session) of each lease)."""
    slots = {path.name: path.read_bytes() for path in sorted(drive.glob("slot-*"))}
    leases = [json.loads(path.read_bytes()) for path in sorted((drive / "leases").iterdir())]
    return slots, [(lease["fence"], lease["session"], lease["released"]) for lease in leases]


@pytest.mark.soak_except("one-0", "one-ahead")
@pytest.mark.parametrize("ahead", [0, HOUR, -HOUR], ids=["0", "ahead", "behind"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_second_container_on_shared_disk_is_refused_and_first_goes_on(container, tmp_path, name, ahead):
    first = container("one", expiry=180)
    assert first.answer()["found"] is None and first.save(1)["saved"] == 1
    [lock] = (tmp_path / "drive" / "locks").glob("r--p.lock")
    before, inode = state_of(tmp_path / "drive"), lock.stat().st_ino
    second = container(name, ahead, expiry=180)
    assert "Another process is working" in second.answer()["refused"]
    assert state_of(tmp_path / "drive") == before and lock.stat().st_ino == inode
    assert first.save(2)["saved"] == 2
    first.kill()
    second.kill()
    after = container(name, ahead, expiry=180).answer()  # the lock proves that both have ended
    assert after["found"] == 2 and after["fence"] == 2 and after["waited"] < 60


@pytest.mark.soak_except("one-ahead")
@pytest.mark.parametrize("ahead", [0, HOUR, -HOUR], ids=["0", "ahead", "behind"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_second_container_with_own_disk_is_refused_by_lease_and_first_goes_on(container, tmp_path, name, ahead):
    first = container("one", private=True)
    assert first.answer()["found"] is None and first.save(1)["saved"] == 1
    before = state_of(tmp_path / "drive")
    second = container(name, ahead, private=True)
    assert "Another session is working" in second.answer()["refused"]
    assert state_of(tmp_path / "drive") == before
    assert first.save(2)["saved"] == 2
    first.kill()
    second.kill()
    after = container(name, ahead, private=True).answer()  # its disk proves nothing: it watches the lease
    assert after["found"] == 2 and after["fence"] == 2 and after["waited"] >= EXPIRY


def test_first_of_three_containers_with_three_clocks_keeps_unit(container, tmp_path):
    """The second has the first's host name; the third is another machine, by name and kernel."""
    boot = tmp_path / "boot_id"
    boot.write_text("00000000-0000-4000-8000-000000000000\n")
    other_kernel = f"mount --bind {boot} /proc/sys/kernel/random/boot_id"
    first = container("one", private=True)
    assert first.answer()["found"] is None and first.save(1)["saved"] == 1
    before = state_of(tmp_path / "drive")
    newcomers = [container("one", HOUR, private=True), container("three", -HOUR, private=True, setup=other_kernel)]
    for one in newcomers:
        assert "Another session is working" in one.answer()["refused"]
    assert state_of(tmp_path / "drive") == before
    for one in newcomers:
        one.kill()
    assert first.save(2)["saved"] == 2
    assert state_of(tmp_path / "drive")[1] == before[1]


@pytest.mark.soak
def test_container_that_sees_released_lease_of_earlier_session_is_refused_by_late_one(container, tmp_path):
    """Its mount shows the lease as it was before the first session began, and the first one's only a second later."""
    earlier = container("one", private=True)
    assert earlier.answer()["fence"] == 1 and earlier.save(1)["saved"] == 1
    earlier.kill()
    leases, stale = tmp_path / "drive" / "leases", tmp_path / "stale"
    [lease] = leases.iterdir()
    stale.mkdir()
    (stale / lease.name).write_text(json.dumps({**json.loads(lease.read_text()), "released": True}))
    first = container("one", private=True)
    assert first.answer()["fence"] == 2 and first.save(2)["saved"] == 2
    before = state_of(tmp_path / "drive")
    late = f"mount --bind {stale} {leases} && (sleep 1.5; umount -l {leases}) &"
    newcomer = container("three", private=True, setup=f"{late} true", expiry=8)
    assert "Another session is working" in newcomer.answer()["refused"]
    assert state_of(tmp_path / "drive") == before and first.save(3)["saved"] == 3


@pytest.mark.soak
def test_container_that_saves_without_loading_is_refused_and_first_goes_on(container, tmp_path):
    """Its first save waits on its own disk until the mount's lease was checked."""
    first = container("one", private=True)
    assert first.answer()["found"] is None and first.save(1)["saved"] == 1
    before = state_of(tmp_path / "drive")
    newcomer = container("one", private=True, load=False)
    assert newcomer.answer()["found"] is None
    answer = newcomer.save(100)
    assert answer == {"saved": None}
    while "saved" in answer:  # until the first one has renewed its lease
        answer = newcomer.save(101)
    assert "Another session is working" in answer["refused"] and answer["kept"]["value"] >= 100
    assert state_of(tmp_path / "drive") == before and first.save(2)["saved"] == 2
    newcomer.kill()
    first.kill()
    later = container("one", private=True, load=False)
    assert later.answer()["found"] is None and later.save(103) == {"saved": None}
    time.sleep(EXPIRY)
    assert later.save(104)["saved"] == 104
    assert {(2, False)} == {(fence, released) for fence, _, released in state_of(tmp_path / "drive")[1]}


@pytest.mark.soak
def test_suspended_session_that_was_taken_over_keeps_its_save_and_harms_no_other(container, tmp_path):
    """A container that stood still for longer than a lease lasts: its last state is saved on its own disk."""
    first = container("one", private=True)
    assert first.answer()["found"] is None and first.save(1)["saved"] == 1
    first.signal(signal.SIGSTOP)
    second = container("two", private=True)
    assert second.answer()["found"] == 1 and second.save(2)["saved"] == 2
    before = state_of(tmp_path / "drive")
    first.signal(signal.SIGCONT)
    answers = [first.save(value) for value in (100, 101)]
    assert answers[0] == {"saved": 100} and "taken this work over" in answers[1]["refused"]
    assert answers[1]["kept"] == {"value": 100}
    assert state_of(tmp_path / "drive") == before and second.save(3)["saved"] == 3


def test_session_of_same_disk_in_new_container_resumes_at_once(container):
    first = container("one", private=False, expiry=180)
    assert first.answer()["found"] is None and first.save(7)["saved"] == 7
    first.kill()
    began = time.monotonic()
    after = container("another", private=False, expiry=180).answer()
    assert after["found"] == 7 and after["fence"] == 2 and time.monotonic() - began < 60
