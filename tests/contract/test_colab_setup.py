"""Setting a runtime up, on a simulated Colab and off it."""

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ipykernel.kernelbase import Kernel

from ml_factory.errors import SettingsError, UnresponsiveMountError, WorkspaceError
from tests.contract.doors import compute_session, places
from utils import colab_setup, runtime
from utils.colab_setup import setup_colab_environment as setup

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
IN_A_BUCKET = tuple(runtime.read_requirement_lines(runtime.BUCKETS))


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    """No variable of the machine that runs the tests reaches them, and none that they set stays."""
    names = ["WANDB_API_KEY", "PGPASSWORD", "ML_FACTORY_ROOT", "COLAB_TPU_1VM", "NETRC", "STORAGE_EMULATOR_HOST"]
    names += ["GOOGLE_APPLICATION_CREDENTIALS", *os.environ]
    for name in names:
        if name in names[:7] or name.startswith(("COLAB_", "ML_FACTORY_", "WANDB_", "TPU_")):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    monkeypatch.setenv("ML_FACTORY_WANDB", "auto")
    monkeypatch.setenv("HOME", "/nowhere")  # no .netrc


@pytest.fixture
def colab(monkeypatch, tmp_path):
    """A simulated Colab: `drive`, `userdata` and `auth` of google.colab, and `installed`, the requests to install."""

    def mount(mountpoint, force_remount=False):
        folder = Path(mountpoint) / "MyDrive"
        print(f"Drive already mounted at {mountpoint}" if folder.is_dir() else f"Mounted at {mountpoint}")
        folder.mkdir(parents=True, exist_ok=True)

    secrets: dict[str, str] = {}
    made = SimpleNamespace(
        drive=SimpleNamespace(mount=mount, flush_and_unmount=lambda timeout_ms: None),
        userdata=SimpleNamespace(get=lambda key: secrets[key]), secrets=secrets, installed=[], root=tmp_path / "drive",
        auth=SimpleNamespace(authenticate_user=lambda: made.installed.append("signed in")),
    )  # fmt: skip
    for name in ("drive", "userdata", "auth"):
        monkeypatch.setitem(sys.modules, f"google.colab.{name}", getattr(made, name))
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    started = time.time()
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: started)
    monkeypatch.setattr(places, "COLAB_ROOT", made.root / "MyDrive/ml_factory")
    monkeypatch.setattr(colab_setup, "LOCAL_ROOT", tmp_path / "local")
    monkeypatch.setattr(
        runtime, "install_missing_packages", lambda path, extra: made.installed.append((path.name, *extra)) or ()
    )
    return made


# ------------------------------------------------------------------ the whole call


def test_setup_mounts_drive_once_and_creates_workspace_folders(colab, capsys):
    info = setup()
    setup()
    printed = capsys.readouterr().out
    assert printed.count("Mounted at") == 1 and printed.count("pandas ") == 2  # one table a call
    assert info.on_colab and info.workspace.root == places.COLAB_ROOT and info.accelerator in ("cpu", "cuda", "tpu")
    assert 11 < info.hours_remaining <= 12 and info.tracking == "offline" and info.installed == ()
    assert all((places.COLAB_ROOT / folder).is_dir() for folder in ("data/raw", "models", "checkpoints", "results"))


def test_setup_off_colab_mounts_and_installs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(colab_setup, "mount_drive", lambda *_: pytest.fail("mounted"))
    monkeypatch.setattr(runtime, "install_missing_packages", lambda *_: pytest.fail("installed"))
    for given in (tmp_path / "ws", str(tmp_path / "ws"), places.Workspace(tmp_path / "ws"), f" {tmp_path / 'ws'} "):
        info = setup(given)
        assert info.workspace.root == tmp_path / "ws" and not info.on_colab and math.isinf(info.hours_remaining)
        assert capsys.readouterr().out.strip() == info.table()
    assert f"pandas {info.versions['pandas']}" in " ".join(info.table().split())
    for name in info.__dataclass_fields__:
        assert info[name] == getattr(info, name)
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError):
        setup(tmp_path / "file")


def test_setup_without_site_packages_reports_missing_packages_and_imports_none(tmp_path):
    """Isolated, without site-packages: the first cell of a fresh machine must get as far as saying what is missing."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from utils.colab_setup import *\nsetup_colab_environment('w')"
    )
    code += "\nprint([name for name in ('torch', 'numpy', 'pandas', 'wandb') if name in sys.modules])"
    for isolated in (["-ISc"], ["-c"]):
        command = [sys.executable, *isolated, code]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("\n[]\n")
        assert ("missing or out of range: numpy" in done.stdout) == (isolated == ["-ISc"])


# ------------------------------------------------------------------ Drive and buckets


@pytest.mark.parametrize("failure", [RuntimeError("refused"), AttributeError("'NoneType' has no 'kernel'"), None])
def test_setup_without_drive_uses_local_workspace_and_warns(colab, failure):
    working = colab.drive.mount

    def broken(*_, **__):
        if failure is not None:
            raise failure
        colab.root.mkdir()  # mounted, and empty

    colab.drive.mount = broken
    first = setup()
    assert first.workspace.root == places.Workspace().root == colab_setup.LOCAL_ROOT
    assert "LOST" in first.notes[0] and "Next: run this cell again" in first.notes[0]
    assert (str(failure) if failure else "MyDrive is missing") in first.notes[0]
    with pytest.raises(WorkspaceError, match=r"could not be mounted.*allow the access"):
        setup(colab.root / "MyDrive/other")
    assert failure is None or not colab.root.exists(), "a plain folder there would block every later mount"
    colab.drive.mount = working
    assert setup().workspace.root == places.COLAB_ROOT, "the next call tries Drive again"


def test_setup_with_workspace_off_drive_does_not_mount(colab, tmp_path, monkeypatch, capsys):
    assert setup(tmp_path / "ws").workspace.root == tmp_path / "ws"
    monkeypatch.setenv("ML_FACTORY_ROOT", str(tmp_path / "mine"))
    assert setup().workspace.root == tmp_path / "mine" and "ounted" not in capsys.readouterr().out


def test_mount_drive_remounts_a_dead_mount_and_no_live_one_and_never_in_a_thread(colab, tmp_path, monkeypatch):
    calls = []
    (tmp_path / "MyDrive").mkdir()
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(tmp_path))
    colab.drive.mount = lambda *given, **named: calls.append(named)
    assert colab_setup.mount_drive(tmp_path) == "" and calls == []
    answers = iter([UnresponsiveMountError("gone"), ["MyDrive"]])

    def names(remote):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(colab_setup.Remote, "names", names, raising=False)
    assert colab_setup.mount_drive(tmp_path) == "" and calls == [{"force_remount": True}]
    output = []
    thread = threading.Thread(target=lambda: output.append(colab_setup.mount_drive("/content/drive")))
    thread.start()
    thread.join()
    assert "never a thread" in output[0] and len(calls) == 1


def test_setup_with_bucket_installs_its_client_and_signs_in_unless_a_key_file_does(colab, monkeypatch, tmp_path):
    class OpenedError(Exception):
        """Raised where the bucket would be opened."""

    def opened(root):
        raise OpenedError(root)

    monkeypatch.setattr(places, "Workspace", type("Workspace", (), {"__new__": lambda cls, root: opened(root)}))
    with pytest.raises(OpenedError):
        setup(tmp_path)
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    with pytest.raises(OpenedError, match="gs://bucket/prefix"):
        setup("gs://bucket/prefix")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(OpenedError):
        setup("gs://bucket/prefix")
    tpu = ("colab-tpu.txt", *IN_A_BUCKET)
    assert colab.installed == [("colab-gpu.txt",), tpu, "signed in", tpu]
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    colab.auth.authenticate_user = lambda: 1 / 0
    with pytest.raises(WorkspaceError, match="allow the access, or set GOOGLE_APPLICATION_CREDENTIALS"):
        setup("gs://bucket/prefix")


# ------------------------------------------------------------------ secrets


def test_secrets_of_colab_go_into_the_environment_alone(colab, tmp_path, capsys):
    for value in ({}, {"WANDB_API_KEY": ""}):
        colab.secrets.update(value)
        info = setup(tmp_path / "ws")
        assert info.tracking == "offline" and "WANDB_API_KEY" not in os.environ
        assert len([note for note in info.notes if "wandb is offline" in note]) == 1
    colab.secrets.update(WANDB_API_KEY=f"{KEY}\n", PGPASSWORD=KEY)
    info = setup(tmp_path / "ws")
    assert colab_setup.load_database_secrets() == ["PGPASSWORD"]
    assert info.tracking == "online" and os.environ["WANDB_API_KEY"] == os.environ["PGPASSWORD"] == KEY
    assert KEY not in capsys.readouterr().out + repr(info)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("wandb", "environment", "tracking"),
    [
        (None, {"WANDB_API_KEY": KEY}, "online"),
        (True, {"WANDB_API_KEY": KEY, "ML_FACTORY_WANDB": "off"}, "online"),
        (False, {"WANDB_API_KEY": KEY}, "off"),
        ("offline", {"WANDB_API_KEY": KEY}, "offline"),
    ],
)
def test_tracking_follows_argument_and_environment(tmp_path, monkeypatch, wandb, environment, tracking):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert setup(tmp_path, wandb=wandb).tracking == tracking
    if wandb is not None:
        assert os.environ["ML_FACTORY_WANDB"] == {"online": "auto"}.get(tracking, tracking)


def test_key_as_wandb_argument_is_refused_and_not_repeated(tmp_path):
    with pytest.raises(SettingsError) as refused:
        setup(tmp_path, wandb=KEY)
    assert KEY not in str(refused.value) and "WANDB_API_KEY" in str(refused.value)
    with pytest.raises(SettingsError, match="did you mean 'offline'"):
        setup(tmp_path, wandb="ofline")


def test_wandb_key_is_requested_once_a_workspace_where_the_user_can_answer(tmp_path, monkeypatch, capsys):
    def login(key: str, verify: bool) -> None:
        if len(key) < 40:
            raise ValueError(key)
        (tmp_path / "netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {key}\n")

    kernel, answers, asked = SimpleNamespace(_allow_stdin=False), iter(["", "not a key", KEY]), []
    assert Kernel.class_traits()["_allow_stdin"].default_value is False  # of a real one, until a front end sets it
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=kernel)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login))
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or next(answers))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for can_answer, folder, prompts, tracking, note in (
        (False, "work", 0, "offline", "no WANDB_API_KEY"),
        (True, "work", 1, "offline", "no key given"),
        (True, "work", 1, "offline", "declined in this workspace"),
        (True, "other", 2, "offline", "the key was refused"),
        (True, "other", 3, "online", ""),
        (True, "third", 3, "online", ""),  # logged in, for all notebooks of the machine
    ):
        kernel._allow_stdin = can_answer
        info = setup(tmp_path / folder)
        assert (len(asked), info.tracking) == (prompts, tracking) and note in " ".join(info.notes)
        assert "not a key" not in " ".join(info.notes)
    written = [path for path in tmp_path.glob("*/**/*") if path.is_file()]
    assert written and not any(KEY.encode() in path.read_bytes() for path in written)
    assert KEY not in capsys.readouterr().out


# ------------------------------------------------------------------ the time left


def test_time_remaining_follows_tier_and_limits(monkeypatch):
    estimate = colab_setup.estimate_training_time_remaining
    lived = 1000 - estimate(limit_hours=1000)  # from the start of process 1
    assert lived * 3600 == pytest.approx(time.time() - psutil.Process(1).create_time(), abs=3.0)
    assert math.isinf(estimate()) and math.isinf(estimate(tier="pro"))  # nothing ends a workstation
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 2.5 * 3600)
    for given in ({"tier": "por"}, {"limit_hours": 0}, {"limit_hours": "twelve"}, {"limit_hours": math.nan}):
        with pytest.raises(SettingsError):
            estimate(**given)
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


def test_hours_expected_on_free_tpu_are_a_usual_session_at_most(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    monkeypatch.setattr(compute_session, "runtime_start_time", lambda: time.time() - 3600)
    assert compute_session.expected_hours_left() == pytest.approx(11, abs=0.01)
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    assert compute_session.expected_hours_left() == 1.5
    left = colab_setup._time_left(compute_session.configured_hours_remaining())
    assert "at most 11.0 h; a free TPU session usually ends after 1.5 h" in left
    monkeypatch.setenv("ML_FACTORY_SESSION_HOURS", "1.75")
    assert compute_session.expected_hours_left() == pytest.approx(0.75, abs=0.01)
