"""The stand-in for google.colab, held to a description of the real one."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from utils import google_colab_shim as shim

ROOT = Path(__file__).resolve().parents[2]
SURFACE = json.loads(Path(__file__).with_name("google_colab_surface.json").read_text())


@pytest.fixture
def colab(monkeypatch):
    """The stand-in, in place for one test."""
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert shim.install_colab_shim()
    yield importlib.import_module("google.colab")
    shim.uninstall_colab_shim()
    assert "google.colab" not in sys.modules and "google.colab.drive" not in sys.modules


def run(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip


def public(module) -> set[str]:
    return {name for name in vars(module) if not name.startswith("_")}


def test_colab_shim_has_exactly_the_described_names(colab):
    described = set(SURFACE["functions"]) | set(SURFACE["exceptions"])
    found = {f"{name}.{member}" for name in colab.__all__ for member in public(getattr(colab, name))}
    assert found == described


@pytest.mark.parametrize("name", SURFACE["functions"])
def test_colab_shim_function_signatures_match_description(colab, name):
    module, member = name.split(".")
    function = getattr(getattr(colab, module), member)
    assert str(inspect.signature(function)) == SURFACE["functions"][name]
    assert function.__module__ == f"google.colab.{module}"


@pytest.mark.parametrize("name", SURFACE["exceptions"])
def test_colab_shim_exceptions_match_description(colab, name):
    module, member = name.split(".")
    cls, wanted = getattr(getattr(colab, module), member), SURFACE["exceptions"][name]
    assert [f"{base.__module__}.{base.__qualname__}" for base in cls.__bases__] == [wanted["base"]]
    if "message" in wanted:
        assert str(cls("KEY")) == wanted["message"]


def test_colab_shim_drive_mount_prints_messages_of_colab(colab, tmp_path, capsys):
    point, states = str(tmp_path / "drive"), SURFACE["says"]
    received = lambda: capsys.readouterr().out.strip()  # noqa: E731
    colab.drive.flush_and_unmount()
    assert received() == states["nothing mounted"]
    colab.drive.mount(point)
    assert received() == states["mounted"].format(mountpoint=point)
    assert (tmp_path / "drive" / "MyDrive").is_dir()
    colab.drive.mount(point)
    assert received() == states["already mounted"].format(mountpoint=point)
    colab.drive.mount(point, force_remount=True)
    assert received() == states["mounted"].format(mountpoint=point)
    (tmp_path / "drive" / "MyDrive" / "kept.txt").write_text("kept")
    colab.drive.flush_and_unmount()
    assert received() == ""
    colab.drive.mount(point)
    assert received() == states["mounted"].format(mountpoint=point)
    assert (tmp_path / "drive" / "MyDrive" / "kept.txt").read_text() == "kept"


def test_colab_shim_drive_mount_of_invalid_mount_point_raises(colab, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    points = {"a space": "a b", "files": "full", "a file": "file", "a symlink": "link", "no parent": "no/where"}
    for case, point in points.items():
        with pytest.raises(ValueError) as refused:
            colab.drive.mount(str(tmp_path / point))
        assert str(refused.value) == SURFACE["says"][case]
    assert not (tmp_path / "no").exists()


def test_colab_shim_userdata_reads_environment(colab, monkeypatch):
    monkeypatch.setenv("A_SECRET", "value")
    assert colab.userdata.get("A_SECRET") == "value"
    with pytest.raises(colab.errors.Error):
        colab.userdata.get("NO_SUCH_SECRET")


def test_colab_shim_page_functions_are_harmless_without_page(colab, tmp_path):
    assert colab.files.upload() == {}
    with pytest.raises(FileNotFoundError):
        colab.files.download(str(tmp_path / "absent"))
    with pytest.raises(colab.errors.RuntimeManagementError):
        colab.runtime.unassign()
    with colab.output.use_tags("a"), colab.output.temporary():
        colab.output.clear(wait=True)
    assert colab.output.eval_js("1 + 1") is None
    colab.auth.authenticate_user()


def test_colab_shim_keeps_installed_google_packages_importable():
    done = run(
        "from utils.google_colab_shim import install_colab_shim\n"
        "assert install_colab_shim()\n"
        "import google.colab, google.protobuf\n"
        "from google.colab import drive, userdata\n"
        "import importlib.util as u; assert u.find_spec('google.colab.drive').name == 'google.colab.drive'\n"
        "print(google.protobuf.__version__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_colab_shim_finds_google_package_installed_later(tmp_path):
    """Nothing named google is here yet (-S hides site-packages); afterwards google.auth is installed."""
    done = run(
        f"sys.path.append({str(tmp_path)!r})\n"
        "from utils.google_colab_shim import install_colab_shim\n"
        "assert install_colab_shim() and install_colab_shim()\n"
        "import google.colab, importlib, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r}) / 'google' / 'auth'; folder.mkdir(parents=True)\n"
        "(folder / '__init__.py').write_text('here = True')\n"
        "importlib.invalidate_caches()\n"
        "import google.auth; assert google.auth.here",
        "-S",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("evidence", ["tag", "module", "file"])
def test_colab_shim_install_on_real_colab_is_refused(tmp_path, evidence):
    environment = {"COLAB_RELEASE_TAG": "release-colab-20260801"} if evidence == "tag" else {}
    lines = ["import types"]
    if evidence == "module":
        lines += ["real = sys.modules['google.colab'] = types.ModuleType('google.colab')"]
    if evidence == "file":
        (tmp_path / "google" / "colab").mkdir(parents=True)
        (tmp_path / "google" / "colab" / "__init__.py").write_text("real = True")
        lines += [f"sys.path.append({str(tmp_path)!r})"]
    lines += [
        "from utils.google_colab_shim import install_colab_shim, is_colab_shim_installed",
        "assert not install_colab_shim() and not is_colab_shim_installed()",
    ]
    lines += {
        "module": ["assert sys.modules['google.colab'] is real"],
        "file": ["import google.colab; assert google.colab.real"],
        "tag": ["assert 'google.colab' not in sys.modules"],
    }[evidence]
    done = run("\n".join(lines), **environment)
    assert done.returncode == 0, done.stderr


def test_project_has_no_folder_named_google():
    assert not [folder for place in (".", "utils", "ml_factory") for folder in (ROOT / place).glob("google*/")]
