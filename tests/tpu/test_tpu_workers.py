"""The worker's script, run by the stand-in for gcloud on two machines that are folders: install, number, key, stop."""

import shlex
import time
from pathlib import Path

import pytest

from ml_factory.tpu.settings import SliceSettings
from ml_factory.tpu.worker_files import METADATA, worker_script

pytestmark = pytest.mark.slow  # so that it begins first

CURL = """#!/bin/sh
# The metadata server of these two machines, which answers with the name of the home folder.
for last; do :; done
[ "$last" = "METADATA" ] && [ ! -f "$HOME/no_metadata" ] && basename "$HOME" | tr -d '\\n'
"""
PYTHON = """#!/bin/sh
# Writes what would be installed; a venv is a folder with a python.
printf '%s\\n' "$*" >> "$HOME/python3.txt"
case "$*" in *"uv venv"*) mkdir -p env/bin && touch env/bin/python && chmod +x env/bin/python ;; esac
case "$*" in *"pip install"*torch*) [ ! -f "$HOME/no_network" ] ;; esac
"""


@pytest.fixture
def workers(play):
    """Call it with settings: a play whose two workers really run what gcloud is to run there."""

    def make(**values: str):
        one = play({"homes": True}, ACCELERATOR_TYPE="v4-16", **values)
        for name, text in (("curl", CURL.replace("METADATA", METADATA)), ("python3", PYTHON)):
            program = one.folder / "bin" / name
            program.write_text(text)
            program.chmod(0o755)
        for worker in "01":
            (one.folder / "homes" / worker).mkdir(parents=True)
        return one

    return make


def until(found, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not found() and time.monotonic() < end:
        time.sleep(0.05)
    return found()


def logs(one, worker: int) -> list[str]:
    """Lines of a worker's log, read in its folder."""
    path = one.folder / "homes" / str(worker) / "ml_factory_tpu" / "train.log"
    return path.read_text().splitlines() if path.exists() else []


def test_worker_script_trains_with_its_own_number_reports_and_stops(workers):
    show = "echo $TPU_NAME $PJRT_DEVICE $TPU_PROCESS_ID of $TPU_PROCESS_COUNT $ML_FACTORY_ROOT; sleep 60"
    one = workers(COMMAND=f"bash -c '{show}'")
    slice_ = one.open()
    try:
        assert slice_.setup().phase == "RUNNING"
        for worker in (0, 1):
            assert until(lambda worker=worker: logs(one, worker))
            assert logs(one, worker) == [f"my-tpu TPU {worker} of 2 gs://my-bucket/my-tpu"]
        assert slice_.look().detail == "2 workers"
        assert (one.folder / "homes" / "1" / "ml_factory_tpu" / "code" / "train.py").is_file()
    finally:
        assert slice_.stop().phase == "STOPPED"
    text = slice_._on_workers("state")
    assert text.splitlines() == ["ML_FACTORY_WORKER idle"] * 2


def test_worker_script_stop_waits_for_last_checkpoint_of_training(workers):
    # the command itself ends at once, a process that it started saves
    save = "(trap 'sleep 0.7; echo saved; exit 0' TERM; echo begun; while :; do sleep 0.05; done) & wait"
    one = workers(COMMAND=shlex.join(["bash", "-c", save]))
    slice_ = one.open()
    slice_.setup()
    assert until(lambda: all(logs(one, worker) == ["begun"] for worker in (0, 1)))
    slice_.stop()
    written = [one.folder / "homes" / worker / "ml_factory_tpu" / "train.log" for worker in "10"]
    assert [path.read_text().splitlines()[-1] for path in written] == ["saved"] * 2  # read at once, the last one first


def test_worker_without_a_number_does_not_train_next_to_another(workers):
    one = workers(COMMAND="echo trained")
    (one.folder / "homes" / "1" / "no_metadata").touch()
    slice_ = one.open()
    slice_.setup()
    assert until(lambda: slice_.look().phase == "TRAINING_FAILED")
    assert until(lambda: logs(one, 0) == ["trained"]) and "number is unknown" in logs(one, 1)[0]


def test_worker_installs_torch_and_library_in_one_call_again_only_for_other_requirements(workers):
    one = workers(COMMAND="true")
    installed = [one.folder / "homes" / worker / "python3.txt" for worker in "01"]
    (one.folder / "homes" / "0" / "no_network").touch()
    slice_ = one.open()
    with pytest.raises(Exception, match="gcloud refused"):
        slice_.setup()
    (one.folder / "homes" / "0" / "no_network").unlink()
    slice_.resume()
    assert until(lambda: slice_.look().phase == "FINISHED")
    words = [path.read_text().splitlines()[-1] for path in installed]
    wanted = "torch==2.9.0 torch_xla[tpu]==2.9.0 ./code[train,track,gs,language,vision] --find-links https://"
    assert all(f"--python env/bin/python {wanted}" in line for line in words)
    before = [path.read_text() for path in installed]
    slice_._on_workers("install")
    assert [path.read_text() for path in installed] == before
    for worker in "01":
        (one.folder / "homes" / worker / "ml_factory_tpu" / "code" / "pyproject.toml").write_text("[project]\n")
    slice_._on_workers("install")
    assert all(len(path.read_text()) > len(text) for path, text in zip(installed, before, strict=True))


def test_worker_reads_key_from_secret_manager_and_shows_it_nowhere(workers, monkeypatch):
    one = workers(WANDB_SECRET="my-secret", COMMAND='bash -c "echo ${#WANDB_API_KEY}; sleep 60"')
    secret = Path(one.folder / "bin" / "gcloud")
    asked = "'secrets versions access latest --secret=my-secret --project=my-project'"
    secret.write_text(
        secret.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\n[ "$*" = {asked} ] && echo 0123456789ab && exit 0\n')
    )
    slice_ = one.open()
    try:
        slice_.setup()
        assert until(lambda: logs(one, 0) == ["12"])
    finally:
        slice_.stop()
    found = [path for path in (one.folder / "homes").rglob("*") if path.is_file()]
    assert found and not any(b"0123456789ab" in path.read_bytes() for path in found)


def test_worker_script_of_one_worker_needs_no_metadata(play):
    settings = play({}).open().settings
    script = worker_script(SliceSettings({**settings.values, "ACCELERATOR_TYPE": "v6e-8"}))
    assert "TPU_PROCESS_COUNT=1" in script and "[ 1 = 1 ]; then number=0" in script
