"""Files that go to each worker: the script that installs, starts, reports and stops; the code of a git checkout."""

import io
import posixpath
import shlex
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import SettingsError
from ml_factory.storage.files import files
from ml_factory.tpu.settings import VARIABLES, SliceSettings

CONFIG_NAMES = ("config.yaml", "recipes/config.yaml")
GUIDES_CONFIG = "recipes/config_tinyllama_tpuv4.yaml"

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"
LIBTPU_INDEX = "https://storage.googleapis.com/libtpu-releases/index.html"
_SCRIPT = r"""#!/bin/bash
# Written by python -m ml_factory tpu. Actions: unpack, install, start, state, log [LINES], stop.
set -eu
cd "$HOME/ml_factory_tpu"
is_alive() { [ -f pid ] && kill -0 -- "-$(cat pid)" 2>/dev/null; }  # any process of the training
is_running() { [ ! -f ended ] && is_alive; }
# Number of this worker in the slice, from the machine's metadata, else from its name t1v-n-…-w-3
worker_number() {
  number="$(curl -s -f -m 10 -H 'Metadata-Flavor: Google' @METADATA@ || true)"
  case "$number" in '' | *[!0-9]*) number="$(hostname | sed -n 's/.*-w-\([0-9][0-9]*\)$/\1/p')" ;; esac
  if [ -z "$number" ] && [ @WORKERS@ = 1 ]; then number=0; fi
  echo "$number"
}
case "${1:-}" in
unpack)
  if is_running; then echo "the training still runs: its code stays"; exit 0; fi
  rm -rf code.new && mkdir code.new && tar -xzf "$HOME/ml_factory_code.tar.gz" -C code.new
  rm -rf code && mv code.new code
  rm -f "$HOME/ml_factory_code.tar.gz"
  ;;
install)
  wanted=@WANTED@" $(cat code/pyproject.toml code/requirements.txt code/requirements/*.txt 2>/dev/null | cksum)"
  [ "$(cat installed 2>/dev/null || true)" = "$wanted" ] && exit 0
  python3 -m pip install --quiet --user uv
  [ -x env/bin/python ] || python3 -m uv venv --quiet --python 3.12 env
  # in one call: the library's packages must fit this torch, not replace it
  python3 -m uv pip install --quiet --python env/bin/python @PACKAGES@ @LIBRARY@ --find-links @INDEX@
  echo "$wanted" > installed
  ;;
start)
  if is_running; then echo "ML_FACTORY_WORKER running"; exit 0; fi
  rm -f ended
  setsid nohup bash "$PWD/worker.sh" run >> train.log 2>&1 < /dev/null &
  echo $! > pid
  echo "ML_FACTORY_WORKER running"
  ;;
run)
  TPU_PROCESS_ID="$(worker_number)"
  if [ -z "$TPU_PROCESS_ID" ]; then
    echo "this worker's number is unknown, and two workers must not both write: see the machine's metadata"
    echo 1 > ended
    exit 1
  fi
  export TPU_PROCESS_ID TPU_PROCESS_COUNT=@WORKERS@
  if [ -z "${WANDB_API_KEY:-}" ] && [ -n @SECRET@ ]; then
    WANDB_API_KEY="$(gcloud secrets versions access latest --secret=@SECRET@ --project=@PROJECT@)" \
      || echo "no key of W&B: the worker's account needs roles/secretmanager.secretAccessor"
    export WANDB_API_KEY
  fi
  export PATH="$PWD/env/bin:$PATH" PJRT_DEVICE=TPU @VARIABLES@
  cd code
  code=0
  @COMMAND@ || code=$?
  echo "$code" > ../ended.new && mv ../ended.new ../ended
  ;;
state)
  if is_running; then echo "ML_FACTORY_WORKER running"
  elif [ -f ended ]; then echo "ML_FACTORY_WORKER ended $(cat ended)"
  elif [ -f pid ]; then echo "ML_FACTORY_WORKER died"
  else echo "ML_FACTORY_WORKER idle"; fi
  ;;
log) if [ -f train.log ]; then tail -n "${2:-100}" train.log; fi ;;  # +N: from line N on
stop)
  if is_alive; then
    kill -TERM -- "-$(cat pid)"
    for _ in $(seq 6000); do is_alive || break; sleep 0.1; done  # it saves its last checkpoint
    if is_alive; then kill -KILL -- "-$(cat pid)"; fi
  fi
  rm -f pid ended
  echo "ML_FACTORY_WORKER idle"
  ;;
*) echo "unknown action: ${1:-}" >&2; exit 2 ;;
esac
"""


def write_worker_files(settings: SliceSettings, folder: Path) -> list[Path]:
    """Write the worker script and the archive of code and config; return their paths. Raises SettingsError."""
    files.make_folder(folder)
    script, archive = folder / "worker.sh", folder / "ml_factory_code.tar.gz"
    files.write(script, worker_script(settings).encode())
    files.write(archive, pack_code(settings))
    return [script, archive]


def worker_script(settings: SliceSettings) -> str:
    """Return the script; every value of the settings stands in it as one quoted word, and no key at all."""
    torch = settings["TORCH_VERSION"]
    packages = [f"torch=={torch}", f"torch_xla[tpu]=={torch}"]
    variables = {
        "ML_FACTORY_ROOT": f"gs://{settings['BUCKET']}/{settings['TPU_NAME']}",
        "BUCKET": settings["BUCKET"],
        "TPU_NAME": settings["TPU_NAME"],
        **({"XLA_USE_BF16": settings["XLA_USE_BF16"]} if settings["XLA_USE_BF16"] else {}),
    }
    library = f"./code[{settings['EXTRAS']}]"
    parts = {
        "WANTED": shlex.quote(f"{' '.join(packages)} {library}"),
        "PACKAGES": shlex.join(packages),
        "METADATA": shlex.quote(METADATA),
        "WORKERS": str(settings.workers),
        "INDEX": shlex.quote(LIBTPU_INDEX),
        "LIBRARY": shlex.quote(library),
        "SECRET": shlex.quote(settings.secret),
        "PROJECT": shlex.quote(settings["PROJECT_ID"]),
        "COMMAND": shlex.join(settings.command_words()),
        "VARIABLES": " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
    }
    pieces = _SCRIPT.split("@")
    return "".join(piece if number % 2 == 0 else parts[piece] for number, piece in enumerate(pieces))


def pack_code(settings: SliceSettings) -> bytes:
    """Return a tar archive of the checkout's tracked files and of the config as config.yaml, with BUCKET in its output.

    Raises SettingsError, also for a COMMAND whose config is not among them.
    """
    folder = Path(settings["CODE_DIR"]).expanduser().resolve()
    try:
        listed = subprocess.run(["git", "-C", str(folder), "ls-files", "-z"], capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError("The code cannot be listed", where=folder, got=error, next_step="install git") from None
    names = [name for name in listed.stdout.decode(errors="surrogateescape").split("\0") if name]
    config = find_config(settings)
    _check_command(settings, {*names, *(CONFIG_NAMES if config else ())})
    if listed.returncode or not names:
        raise SettingsError(
            "The code is no git checkout",
            where="CODE_DIR",
            got=folder,
            wanted="tracked files",
            next_step="set CODE_DIR to the checkout; only tracked files are copied",
        )
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            if (folder / name).is_file() and not (folder / name).is_symlink():
                archive.add(folder / name, arcname=name, recursive=False)
        if config:
            _add_config(archive, config, settings["BUCKET"])
    return packed.getvalue()


def find_config(settings: SliceSettings) -> Path | None:
    """Return the file that is packed as config.yaml: CONFIG, else for the default COMMAND the one of the guide."""
    if settings["CONFIG"]:
        return check_file_exists(Path(settings["CONFIG"]).expanduser(), "the file that COMMAND reads")
    guides = Path(settings["CODE_DIR"]).expanduser() / GUIDES_CONFIG
    return guides if settings["COMMAND"] == VARIABLES["COMMAND"][0] and guides.is_file() else None


def _check_command(settings: SliceSettings, packed: set[str]) -> None:
    """Raise SettingsError where the command reads a config that the workers will not have."""
    words = " ".join(settings.command_words()).replace("--config=", "--config ").split(" ")
    for flag, name in pairwise(words):
        if flag == "--config" and not name.startswith("/") and posixpath.normpath(name) not in packed:
            raise SettingsError(
                "The workers would not have this config", where="COMMAND", got=name,
                wanted="a tracked file, by its path from CODE_DIR", next_step="set CONFIG to the file: it is copied as"
                " config.yaml; or track it in git",
            )  # fmt: skip


def _add_config(archive: tarfile.TarFile, path: Path, bucket: str) -> None:
    content = files.read(path, 1 << 20)
    content = content.replace(b"gs://your-bucket-name", f"gs://{bucket}".encode())
    for name in CONFIG_NAMES:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
