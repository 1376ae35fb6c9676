"""Setting a runtime up, on a simulated Colab (stand-in and tag, in a process of its own) and off it."""

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ml_factory.checkpoints import compute_session
from ml_factory.errors import SettingsError, UnresponsiveMountError, WorkspaceError
from ml_factory.storage import workspace as places
from utils import colab_setup, runtime

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
COLAB = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {project!r})
from ml_factory.checkpoints import compute_session
compute_session.runtime_start_time = lambda started=time.time(): started  # not that of the machine that runs the tests
from tests import google_colab
google_colab.install()
os.environ["COLAB_RELEASE_TAG"] = "release-colab-20260801"
from ml_factory.storage import workspace as places
places.COLAB_ROOT = Path("content/drive/MyDrive/ml_factory").absolute()
from utils import colab_setup
colab_setup.LOCAL_ROOT = Path("content/local").absolute()
from google.colab import drive, errors, userdata
setup = colab_setup.setup_colab_environment
def told(**facts):
    print("FACTS", json.dumps(facts, default=str))
"""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    """No variable of the machine that runs the tests reaches them."""
    for name in list(os.environ):
        if name.startswith(("COLAB_", "ML_FACTORY_", "WANDB_", "TPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ML_FACTORY_WANDB", "auto")
    monkeypatch.setenv("HOME", "/nowhere")  # no .netrc
    monkeypatch.delenv("NETRC", raising=False)


@pytest.fixture
def colab(tmp_path):
    """run(code, **environment) -> (reported facts, all output), on a simulated Colab in an empty folder."""
    (tmp_path / "content").mkdir()

    def run(code: str, **environment: str) -> tuple[dict, str]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", COLAB.format(project=str(ROOT)) + code],
            capture_output=True, text=True, timeout=120, cwd=tmp_path,
            # Should anything be missing here, pip is kept away from the environment that runs the tests.
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_NO_INDEX": "1",
                 "PIP_TARGET": str(tmp_path / "site"), **environment},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        facts = [line.removeprefix("FACTS ") for line in done.stdout.splitlines() if line.startswith("FACTS ")]
        return json.loads(facts[0]) if facts else {}, done.stdout + done.stderr

    return run


# ------------------------------------------------------------------ the end


def test_colab_safe_stop_is_safe_only_after_drive_flush(colab):
    code = """
info = setup()
from ml_factory import CheckpointManager
manager = CheckpointManager(info.workspace.checkpoints)
manager.save_checkpoint(phase="p", state={"step": 1}, force=True)
done = []
first = colab_setup.safe_stop(60, logs=[lambda: done.append("log")])
def fails(timeout_ms):
    raise ValueError("the other end is gone")
drive.flush_and_unmount = fails
told(first=first, second=colab_setup.safe_stop(60), done=done)
manager.close()
"""
    facts, printed = colab(code)
    assert facts == {"first": True, "second": False, "done": ["log"]}
    assert "Safe to stop" in printed and "Not confirmed: ValueError: the other end is gone" in printed


# ------------------------------------------------------------------ the whole call


def test_colab_setup_mounts_drive_once_and_creates_workspace_folders(colab, tmp_path):
    facts, printed = colab("i = setup(); setup(); told(**{n: getattr(i, n) for n in ('on_colab', 'accelerator', "
                           "'hours_remaining', 'tracking', 'installed')}, root=i.workspace.root)")  # fmt: skip
    root = tmp_path / "content/drive/MyDrive/ml_factory"
    assert printed.count("Mounted at") == 1
    assert facts["on_colab"] is True and facts["root"] == str(root)
    assert facts["accelerator"] in ("cpu", "cuda", "tpu")
    assert 0 <= facts["hours_remaining"] <= 12
    assert facts["tracking"] == "offline" and facts["installed"] == []
    assert all((root / folder).is_dir() for folder in ("data/raw", "models", "checkpoints", "results"))
    assert printed.count("versions") == 0 and printed.count("pandas ") == 2  # one table a call


def test_colab_setup_off_colab_mounts_and_installs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(colab_setup, "mount_drive", lambda *_: pytest.fail("mounted"))
    monkeypatch.setattr(runtime, "install_missing_packages", lambda *_: pytest.fail("installed"))
    info = colab_setup.setup_colab_environment(tmp_path / "ws")
    assert not info.on_colab and math.isinf(info.hours_remaining)
    assert info.workspace == places.Workspace(tmp_path / "ws")
    assert info.device in ("cpu", "cuda", "xla")
    assert capsys.readouterr().out.strip() == info.table()
    assert f"pandas {info.versions['pandas']}" in " ".join(info.table().split())


def test_env_info_fields_are_readable_as_attributes_and_keys(tmp_path):
    info = colab_setup.setup_colab_environment(tmp_path / "ws")
    for name in (*info.__dataclass_fields__, "device"):
        assert info[name] == getattr(info, name)
    with pytest.raises(KeyError, match="workspace"):
        info["worspace"]


def test_colab_setup_off_colab_with_install_always_installs_requirements(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "install_missing_packages", lambda path, extra: (f"asked {path.name}",))
    assert colab_setup.setup_colab_environment(tmp_path, install="always").installed == ("asked requirements.txt",)
    with pytest.raises(SettingsError, match="install"):
        colab_setup.setup_colab_environment(tmp_path, install="yes")


def test_colab_setup_without_site_packages_reports_missing_packages(tmp_path):
    """Isolated, without site-packages: the first cell of a fresh machine must get as far as saying what is missing."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from utils.colab_setup import *; setup_colab_environment('ws')"
    )
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "missing or out of range: numpy" in done.stdout


def test_colab_setup_imports_no_torch_numpy_pandas_or_wandb(colab):
    facts, _ = colab("setup(); told(loaded=[n for n in ('torch', 'numpy', 'pandas', 'wandb') if n in sys.modules])")
    assert facts["loaded"] == []


# ------------------------------------------------------------------ Drive


FAILURES = {
    "refused by the person": "errors.Error('credential propagation was unsuccessful')",
    "no kernel": """AttributeError("'NoneType' object has no attribute 'kernel'")""",
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_colab_setup_without_drive_uses_local_workspace_and_warns(colab, tmp_path, failure):
    facts, _ = colab(
        f"def broken(*a, **k): raise {failure}\n"
        "working, drive.mount = drive.mount, broken\n"
        "first = setup(); again = places.Workspace(); drive.mount = working; second = setup()\n"
        "told(first=first.workspace.root, again=again.root, second=second.workspace.root, notes=first.notes)"
    )
    assert facts["first"] == facts["again"] == str(tmp_path / "content/local")
    assert "LOST" in facts["notes"][0] and "Next: run this cell again" in facts["notes"][0]
    assert facts["second"] == str(tmp_path / "content/drive/MyDrive/ml_factory"), "the next call tries Drive again"


def test_colab_setup_with_workspace_on_unmounted_drive_raises(colab, tmp_path):
    facts, _ = colab(
        "def broken(*a, **k): raise ValueError('mount failed')\n"
        "drive.mount = broken\n"
        "from ml_factory.errors import WorkspaceError\n"
        "try: setup('content/drive/MyDrive/other')\n"
        "except WorkspaceError as error: told(message=str(error))"
    )
    assert "mount failed" in facts["message"] and "allow the access" in facts["message"]
    assert not (tmp_path / "content/drive").exists(), "a plain folder there would block every later mount"


def test_colab_setup_with_workspace_off_drive_does_not_mount(colab, tmp_path):
    facts, printed = colab("told(root=setup('ws').workspace.root)")
    assert facts["root"] == str(tmp_path / "ws") and "Mounted" not in printed
    facts, printed = colab("told(root=setup().workspace.root)", ML_FACTORY_ROOT=str(tmp_path / "mine"))
    assert facts["root"] == str(tmp_path / "mine") and "Mounted" not in printed


def test_colab_setup_with_empty_mount_reports_missing_mydrive(colab):
    facts, _ = colab("drive.mount = lambda *a, **k: None; told(notes=setup().notes)")
    assert "MyDrive is missing" in facts["notes"][0]


def test_mount_drive_in_thread_is_refused(monkeypatch):
    output = []
    monkeypatch.setattr(colab_setup.importlib, "import_module", lambda name: pytest.fail("mounted"))
    thread = threading.Thread(target=lambda: output.append(colab_setup.mount_drive("/content/drive")))
    thread.start()
    thread.join()
    assert "never a thread" in output[0]


def test_mount_drive_with_dead_mount_forces_remount(tmp_path, monkeypatch):
    calls = []

    class Drive:
        @staticmethod
        def mount(mountpoint, force_remount=False):
            calls.append((mountpoint, force_remount))
            monkeypatch.undo()
            (tmp_path / "MyDrive").mkdir()

    def dead(remote):
        raise UnresponsiveMountError("gone")

    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path))
    monkeypatch.setattr(colab_setup.Remote, "names", dead)
    monkeypatch.setitem(sys.modules, "google.colab.drive", Drive)
    assert colab_setup.mount_drive(tmp_path) == ""
    assert calls == [(str(tmp_path), True)]


def test_mount_drive_with_live_mount_does_not_remount(tmp_path, monkeypatch):
    (tmp_path / "MyDrive").mkdir()
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path))
    monkeypatch.setattr(colab_setup.importlib, "import_module", lambda name: pytest.fail("mounted again"))
    assert colab_setup.mount_drive(tmp_path) == ""


# ------------------------------------------------------------------ secrets


def test_colab_setup_puts_wandb_key_of_colab_secrets_only_into_environment(colab, tmp_path):
    facts, printed = colab(
        f"userdata.get = lambda key: {{'WANDB_API_KEY': {KEY!r} + chr(10)}}[key]\n"
        f"i = setup('ws'); told(tracking=i.tracking, same=os.environ['WANDB_API_KEY'] == {KEY!r}, shown=repr(i))"
    )
    assert facts["tracking"] == "online" and facts["same"]
    assert KEY not in printed and KEY not in facts["shown"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_database_secrets_of_colab_go_into_environment_alone(colab):
    facts, printed = colab(
        f"userdata.get = lambda key: {{'PGPASSWORD': {KEY!r}}}[key]\n"
        "from utils.colab_setup import load_database_secrets\n"
        f"told(names=load_database_secrets(), same=os.environ['PGPASSWORD'] == {KEY!r})"
    )
    assert facts == {"names": ["PGPASSWORD"], "same": True} and KEY not in printed


SECRETS = {
    "absent": "raise userdata.SecretNotFoundError(key)",
    "empty": "return ''",
}


@pytest.mark.parametrize("failure", SECRETS.values(), ids=SECRETS)
def test_colab_setup_without_wandb_secret_is_offline_with_one_note(colab, failure):
    facts, _ = colab(
        f"def get(key): {failure}\nuserdata.get = get\n"
        "i = setup('ws'); told(tracking=i.tracking, notes=i.notes, key='WANDB_API_KEY' in os.environ)"
    )
    assert facts["tracking"] == "offline" and not facts["key"]
    assert len([note for note in facts["notes"] if "wandb is offline" in note]) == 1


@pytest.mark.parametrize(
    ("wandb", "environment", "tracking"),
    [
        (None, {}, "offline"),
        (None, {"WANDB_API_KEY": KEY}, "online"),
        (True, {"WANDB_API_KEY": KEY, "ML_FACTORY_WANDB": "off"}, "online"),
        (False, {"WANDB_API_KEY": KEY}, "off"),
        ("offline", {"WANDB_API_KEY": KEY}, "offline"),
        (None, {"WANDB_API_KEY": KEY, "ML_FACTORY_WANDB": "off"}, "off"),
        (None, {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "off"),
        (None, {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_colab_setup_tracking_follows_argument_and_environment(tmp_path, monkeypatch, wandb, environment, tracking):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert colab_setup.setup_colab_environment(tmp_path, wandb=wandb).tracking == tracking
    if wandb is not None:
        assert os.environ["ML_FACTORY_WANDB"] == {"online": "auto"}.get(tracking, tracking)


def test_colab_setup_with_key_as_wandb_argument_raises_without_key(tmp_path):
    with pytest.raises(SettingsError) as refused:
        colab_setup.setup_colab_environment(tmp_path, wandb=KEY)
    assert KEY not in str(refused.value) and "WANDB_API_KEY" in str(refused.value)
    with pytest.raises(SettingsError, match="did you mean 'offline'"):
        colab_setup.setup_colab_environment(tmp_path, wandb="ofline")


# ------------------------------------------------------------------ the time left


def test_time_remaining_counts_from_start_of_process_1():
    lived = 1000 - colab_setup.estimate_training_time_remaining(limit_hours=1000)
    assert lived * 3600 == pytest.approx(time.time() - psutil.Process(1).create_time(), abs=3.0)


def test_time_remaining_counts_from_container_start_not_boot():
    """A new process namespace is what a container is: its process 1 began just now, the machine long before."""
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    code += "from utils.colab_setup import estimate_training_time_remaining as left\nprint(3600 * (1 - left('', 1)))"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"no new process namespace here: {done.stderr.strip()[:80]}")
    assert float(done.stdout) < 20 < time.clock_gettime(time.CLOCK_BOOTTIME)


def test_time_remaining_follows_tier_and_limits(monkeypatch):
    estimate = colab_setup.estimate_training_time_remaining
    assert math.isinf(estimate()) and math.isinf(estimate(tier="pro"))  # nothing ends a workstation
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 2.5 * 3600)
    left = {"free": 9.5, "Pro": 21.5, "pro+": 21.5}
    assert {tier: estimate(tier=tier) for tier in left} == pytest.approx(left, abs=0.01)
    assert estimate() == pytest.approx(9.5, abs=0.01)
    assert estimate(limit_hours=3) == pytest.approx(0.5, abs=0.01) and estimate(limit_hours=1) == 0.0
    monkeypatch.setenv("ML_FACTORY_COLAB_TIER", "pro")
    assert estimate() == pytest.approx(21.5, abs=0.01)
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "6")
    assert estimate() == pytest.approx(3.5, abs=0.01)
    monkeypatch.delenv("COLAB_RELEASE_TAG")
    assert estimate() == pytest.approx(3.5, abs=0.01), "a limit somebody set counts everywhere"


@pytest.mark.parametrize(
    "given", [{"tier": "por"}, {"limit_hours": 0}, {"limit_hours": "twelve"}, {"limit_hours": math.nan}]
)
def test_time_remaining_with_invalid_limit_raises(given):
    with pytest.raises(SettingsError):
        colab_setup.estimate_training_time_remaining(**given)


def test_colab_setup_accepts_workspace_as_path_string_or_object(tmp_path):
    for given in (tmp_path / "ws", str(tmp_path / "ws"), places.Workspace(tmp_path / "ws"), f" {tmp_path / 'ws'} "):
        assert colab_setup.setup_colab_environment(given).workspace.root == tmp_path / "ws"


def test_colab_setup_with_file_as_workspace_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError):
        colab_setup.setup_colab_environment(tmp_path / "file")
