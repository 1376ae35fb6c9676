"""Packages and accelerators: what is there, what is missing, what cannot work together."""

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from utils import runtime

ROOT = Path(__file__).resolve().parents[2]
# Colab in August 2026: what each runtime brings along of what we use.
COLAB_GPU = {
    "numpy": "2.1.3", "pandas": "2.2.3", "pyarrow": "18.1.0", "scikit-learn": "1.6.1", "scipy": "1.16.3",
    "torch": "2.11.0", "xgboost": "3.4.1", "lightgbm": "4.6.0", "wandb": "0.28.1", "safetensors": "0.8.0",
    "ipywidgets": "7.7.1", "ipykernel": "6.17.1",
}  # fmt: skip
COLAB_TPU = {
    **{name: version for name, version in COLAB_GPU.items() if name not in ("xgboost", "lightgbm", "wandb")},
    "torch": "2.9.0", "torch_xla": "2.9.0", "libtpu": "0.0.21.1", "pyarrow": "25.0.1",
}  # fmt: skip
NEVER = {"torch", "torch_xla", "numpy", "pandas", "scipy", "pyarrow", "scikit-learn", "ipython", "ipykernel"}


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that these packages, and no others, are installed."""

    def installed(versions: dict[str, str]) -> None:
        monkeypatch.setattr(runtime, "installed_version", versions.get)

    return installed


# ------------------------------------------------------------------ the lists


def test_requirements_ranges_accept_versions_on_colab():
    """Our ranges must accept what Colab brings, or setting up would want to replace it."""
    wanted = {Requirement(line).name: Requirement(line) for line in runtime.read_requirement_lines(runtime.GENERAL)}
    for there in (COLAB_GPU, COLAB_TPU):
        refused = [name for name, version in there.items() if name in wanted and version not in wanted[name].specifier]
        assert refused == []


@pytest.mark.parametrize(("name", "there"), [("colab-gpu.txt", COLAB_GPU), ("colab-tpu.txt", COLAB_TPU)])
def test_colab_requirements_list_only_packages_absent_on_runtime(name, there):
    listed = {Requirement(line).name for line in runtime.read_requirement_lines(ROOT / "requirements" / name)}
    assert listed and not listed & set(there) and not listed & NEVER
    for missing in ("xgboost", "lightgbm", "catboost", "wandb", "papermill"):
        assert missing in listed or missing in there


def test_colab_constraints_accept_installed_versions():
    kept = {
        Requirement(line).name: Requirement(line).specifier for line in runtime.read_requirement_lines(runtime.KEEP)
    }
    assert kept.keys() >= NEVER
    for there in (COLAB_GPU, COLAB_TPU):
        assert [name for name, version in there.items() if version not in kept.get(name, SpecifierSet())] == []


def test_dev_pins_are_exact_and_within_ranges_and_constraints():
    pins = {Requirement(line).name: Requirement(line) for line in
            runtime.read_requirement_lines(ROOT / "requirements/dev.txt")}  # fmt: skip
    lock = (ROOT / "requirements/locked/dev.txt").read_text(encoding="utf-8")
    closure = {one.name: one for one in map(Requirement, re.findall(r"^(\w\S*==.*) \\$", lock, re.MULTILINE))}
    ranges = {Requirement(line).name: Requirement(line) for line in runtime.read_requirement_lines(runtime.GENERAL)}
    assert pins.keys() >= ranges.keys()
    for name, pin in pins.items():
        version = re.fullmatch(r"==([\d.]+)", str(pin.specifier))[1]
        assert closure[name.lower().replace("_", "-")].specifier == pin.specifier
        assert name not in ranges or version in ranges[name].specifier


# ------------------------------------------------------------------ versions


@pytest.mark.parametrize(
    "line", ["numpy>=2.0,<3", "numpy==2.4.6", "numpy>=2.10", "numpy<2.4", "numpy>=2.4.6,<2.4.7", "numpy"]
)
@pytest.mark.parametrize("version", ["2.4.6", "2.4.6+cpu", "2.0", "2", "3.0.0", "2.10.0", "1.26.4"])
def test_is_met_agrees_with_packaging_specifiers(pretend, line, version):
    pretend({"numpy": version})
    assert runtime._is_met(line) == (version.split("+")[0] in Requirement(line).specifier)


@pytest.mark.parametrize(
    ("torch", "xla", "works"),
    [("2.9.0", "2.9.0", True), ("2.9.0+cpu", "2.9.0", True), ("2.11.0", None, True), (None, None, True),
     ("2.11.0", "2.9.0", False), ("2.9.1", "2.9.0", False), ("2.13.0+cpu", "2.9.0", False), (None, "2.9.0", False)],
)  # fmt: skip
def test_check_torch_xla_pair_with_mismatched_versions_raises(torch, xla, works, monkeypatch):
    versions = {name: version for name, version in (("torch", torch), ("torch_xla", xla)) if version}
    if works:
        return runtime.check_torch_xla_pair(versions)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    with pytest.raises(runtime.RuntimeMismatchError, match=r"wanted torch 2\.9\.0\. Next: pip install torch==2\.9\.0"):
        runtime.check_torch_xla_pair(versions)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab-20260801")
    with pytest.raises(runtime.RuntimeMismatchError, match="delete runtime"):
        runtime.check_torch_xla_pair(versions)


# ------------------------------------------------------------------ installing


@pytest.fixture
def pip(monkeypatch, pretend):
    """The calls of pip, which succeed; what they install is then there."""
    calls = []

    def run(command, **_):
        at = command.index("-c")
        lines, constraints = command[at + 2 :], Path(command[at + 1]).read_text().splitlines()
        new = {Requirement(line).name: re.search(r"[\d.]+", line.partition("=")[2])[0] for line in lines}
        calls.append((new, constraints))
        known = runtime.installed_version
        monkeypatch.setattr(runtime, "installed_version", lambda name: known(name) or new.get(name))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(runtime.subprocess, "run", run)
    return calls


@pytest.mark.parametrize(
    ("tpu", "there", "more"), [("", COLAB_GPU, set()), ("v5e-1", COLAB_TPU, {"xgboost", "lightgbm", "wandb"})]
)
def test_install_missing_on_colab_installs_only_missing_and_constrains_rest(pip, pretend, tpu, there, more):
    added = {"catboost", "cyclopts", "exchange_calendars", "papermill", "xxhash"} | more
    others = ("numba", "llvmlite", "threadpoolctl", "matplotlib", "jinja2", "rich", "nbformat")
    pretend({**there, **dict.fromkeys(others, "99")})
    path = ROOT / "requirements" / ("colab-tpu.txt" if tpu else "colab-gpu.txt")
    installed = runtime.install_missing_packages(path, ())
    pins, constraints = pip[0]
    assert added == {name.split()[0] for name in installed} == pins.keys()
    assert {f"{name}=={there[name]}" for name in ("torch", "numpy", "pandas", "pyarrow")} <= set(constraints)
    assert runtime.install_missing_packages(path, ()) == () and len(pip) == 1, "a second call has nothing to do"


def test_install_missing_upgrades_package_out_of_range(pip, pretend):
    pretend({**COLAB_GPU, "pandas": "1.5.3"})
    runtime.install_missing_packages(runtime.GENERAL, ())
    pins, constraints = pip[0]
    assert "pandas" in pins and not [line for line in constraints if line.startswith("pandas")]


def test_install_missing_that_fails_reports_the_message_of_pip(monkeypatch, pretend):
    def late(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    pretend({**COLAB_GPU, "papermill": None})
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No space left on device")
    for run, message in ((late, "timed out"), (lambda command, **_: failed, "No space left on device")):
        monkeypatch.setattr(runtime.subprocess, "run", run)
        with pytest.raises(runtime.RuntimeMismatchError, match=f"{message}.*Next: check the network"):
            runtime.install_missing_packages(ROOT / "requirements/colab-gpu.txt", ())


# ------------------------------------------------------------------ accelerators


@pytest.fixture
def no_tpu(monkeypatch):
    for name in ("TPU_ACCELERATOR_TYPE", "COLAB_TPU_1VM"):
        monkeypatch.delenv(name, raising=False)


def test_tpu_chip_follows_colab_environment_variables(no_tpu, monkeypatch, tmp_path):
    assert runtime.tpu_chip(tmp_path) == ""
    monkeypatch.setenv("COLAB_TPU_1VM", "")
    assert runtime.tpu_chip(tmp_path) == ""
    monkeypatch.setenv("COLAB_TPU_1VM", "1")
    assert runtime.tpu_chip(tmp_path) == "TPU"
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v6e-1")
    assert runtime.tpu_chip(tmp_path) == "v6e-1"


@pytest.mark.parametrize(
    ("vendor", "device", "chip"),
    [("0x1ae0", "0x0063", "v5e"), ("0x1ae0", "0x0042", ""), ("0x10de", "0x0063", ""), ("0x1ae0", "0x006f", "v6e")],
)
def test_tpu_chip_on_pci_bus_is_distinguished_from_network_card(no_tpu, tmp_path, vendor, device, chip):
    for slot, ids in {"0000:00:01.0": ("0x8086", "0x1237"), "0000:00:05.0": (vendor, device)}.items():
        (tmp_path / slot).mkdir()
        for name, text in zip(("vendor", "device"), ids, strict=True):
            (tmp_path / slot / name).write_text(text + "\n")
    assert runtime.tpu_chip(tmp_path) == chip


def test_gpu_name_reads_nvidia_smi_output(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runtime.gpu_name() == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Tesla T4, 15360 MiB'\necho 'Tesla T4, 15360 MiB'\n")
    tool.chmod(0o755)
    assert runtime.gpu_name() == "Tesla T4, 15360 MiB"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runtime.gpu_name() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert runtime.gpu_name() == ""


@pytest.mark.parametrize(
    ("tpu", "gpu", "xla", "torch", "chosen", "noted"),
    [
        ("", "", False, "2.9.0", "cpu", ""), ("", "T4", False, "2.9.0+cu126", "cuda", ""),
        ("", "T4", False, "2.9.0", "cuda", ""), ("", "T4", False, "2.9.0+cpu", "cpu", "without CUDA"),
        ("v5e-1", "", True, "2.9.0", "tpu", ""), ("v5e-1", "", False, "2.9.0", "cpu", "torch_xla is not"),
        ("", "", True, "2.9.0", "cpu", ""), ("v5e-1", "T4", True, "2.9.0+cu126", "tpu", ""),
    ],
)  # fmt: skip
def test_choose_accelerator_requires_supporting_packages(tpu, gpu, xla, torch, chosen, noted):
    notes: list[str] = []
    versions = {"torch": torch, **({"torch_xla": "2.9.0"} if xla else {})}
    assert runtime.choose_accelerator(tpu, gpu, versions, notes)[0] == chosen
    assert (noted in notes[0]) if noted else notes == []
