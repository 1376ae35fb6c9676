"""The cell that every notebook begins with: it finds the code, unpacks the wheel of `make colab`, or fetches it
(decision 0002).

The only code of a notebook that runs before the library is there, which is why it is a text here.
"""

# The first code cell of every notebook. The linter holds each notebook to this text.
BOOTSTRAP = """\
#@title Find the code, or fetch it { display-mode: "form" }
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = os.environ.get("ML_FACTORY_REPOSITORY", "https://github.com/{slug}")
REF = os.environ.get("ML_FACTORY_REF", "{ref}")
SECRET = r"//[^/@\\s]*@"  # a token in the address is for git alone: no output, no folder's name
SHOWN = re.sub(SECRET, "//", REPOSITORY)
COLAB = "COLAB_RELEASE_TAG" in os.environ or Path("/var/colab/hostname").exists()
DRIVE = Path(os.environ.get("ML_FACTORY_DRIVE", "/content/drive"))
NAMELESS = "github.com/OWNER/" in REPOSITORY  # the placeholder: nobody's repository


def is_checkout(folder):
    return (folder / "ml_factory" / "__init__.py").is_file() and (folder / "utils" / "colab_setup.py").is_file()


def git(*words):
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(["git", *map(str, words)], capture_output=True, text=True, env=quiet)
    except FileNotFoundError:
        return False, "git is not installed"
    return done.returncode == 0, (done.stdout or done.stderr).strip()


def find_wheel():
    if COLAB and NAMELESS and not (DRIVE / "MyDrive").is_dir():
        importlib.import_module("google.colab.drive").mount(str(DRIVE))
    folders = Path.cwd(), DRIVE / "MyDrive" / "ml_factory"
    found = [path for folder in folders for path in folder.glob("ml_factory-*.whl")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def unpack(wheel, place):
    aside = place.with_name(f"{place.name}.{os.getpid()}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(aside)
    aside.rename(place)


def fetch(place):
    if NAMELESS:
        advice = "put what `make colab` writes into MyDrive/ml_factory, or set ML_FACTORY_REPOSITORY to your copy"
        raise RuntimeError(f"{SHOWN} is a placeholder, no repository. Next: {advice}")
    aside = place.with_name(f"{place.name}.{os.getpid()}")  # moved into place when complete, so never half there
    git("init", "--quiet", aside)
    for wanted in (REF, "HEAD"):
        good, said = git("-C", aside, "fetch", "--quiet", "--depth=1", REPOSITORY, wanted)
        if good and git("-C", aside, "checkout", "--quiet", "--detach", "FETCH_HEAD")[0]:
            if wanted != REF:
                print(f"{SHOWN} has no {REF} yet: took its default branch instead.")
            return aside.rename(place)
    shutil.rmtree(aside, ignore_errors=True)
    advice = "Next: look at the network, or set ML_FACTORY_REPOSITORY and ML_FACTORY_REF."
    raise RuntimeError(f"Could not fetch {REF} from {SHOWN}: {re.sub(SECRET, '//', said)}. {advice}")


if COLAB:
    kept = Path("/content/ml_factory_code")  # the machine's own disk, never Drive
else:
    kept = Path.home() / ".cache" / "ml_factory" / re.sub(r"[^\\w.-]+", "-", f"{SHOWN}-{REF}")
above = [folder for folder in (Path.cwd(), *Path.cwd().parents) if is_checkout(folder)]
wheel = None if above or is_checkout(kept) else find_wheel()
if wheel:
    kept = kept.with_name(f"{wheel.stem}-{hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]}")
if not above and not is_checkout(kept):
    kept.parent.mkdir(parents=True, exist_ok=True)
    unpack(wheel, kept) if wheel else fetch(kept)
CODE = (above or [kept])[0]
sys.path.insert(0, str(CODE))
known, version = git("-C", CODE, "describe", "--always", "--dirty")
print(f"Code: {CODE} ({version if known else wheel.name if wheel else 'not under git'})")
"""


def bootstrap_text(slug: str, ref: str) -> str:
    """The bootstrap cell for the repository github.com/`slug` at the pinned `ref`."""
    return BOOTSTRAP.replace("{slug}", slug).replace("{ref}", ref).rstrip("\n")
