"""Check this machine, the installation and the workspace, with advice for each problem."""

from ml_factory.checkpoints.schedule import configured_hours_remaining
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import EXTRAS, LazyModule, missing_package_error
from ml_factory.models.base import installed_library_versions
from ml_factory.process_identity import cores
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, on_colab, parse_raw_bars_name

NEEDED = (
    "numpy",
    "pandas",
    "pyarrow",
    "numba",
    "scikit-learn",
    "xxhash",
    "matplotlib",
    "exchange_calendars",
)
MODELS = ("xgboost", "lightgbm", "catboost", "torch")
OPTIONAL = ("papermill", "wandb")
LITTLE_SPACE = 2_000_000_000
device, spec = LazyModule("ml_factory.training.device"), LazyModule("ml_factory.training.spec")


def run_doctor_checks(workspace: Workspace) -> dict[str, dict]:
    """Check Python and libraries, device, session, disk, and raw bars: name -> value, advice, and `good`, False for a
    problem of a later run.
    """
    versions = installed_library_versions((*NEEDED, *MODELS, *OPTIONAL))
    checks: dict[str, dict] = {"python": {"value": versions["python"]}}
    for name in (*NEEDED, *MODELS, *OPTIONAL):
        missing = name not in versions
        advice = missing_package_error(name).next_step if name in EXTRAS else f"pip install {name}"
        good = not missing or name in EXTRAS  # the base prepares and predicts without what an extra brings
        checks[name] = {"value": versions.get(name, "absent"), "good": good, "advice": advice if missing else ""}
    if "torch" in versions:
        checks["device"] = {"value": device.pick_device(spec.TrainSpec()).kind}
    checks["cores"] = {"value": str(cores())}
    if on_colab():
        try:
            checks["hours left"] = {"value": f"{configured_hours_remaining():.1f}"}
        except SettingsError as error:  # a wrong $ML_FACTORY_COLAB_TIER or $ML_FACTORY_SESSION_HOURS
            wrong = {"value": f"{error.what}: {error.got}", "good": False, "advice": error.next_step}
            checks["hours left"] = wrong
    free = files.free_bytes(workspace.root)
    raw = [name for name in files.names(workspace.raw) if parse_raw_bars_name(name)]
    advice = "free some space; on Google Drive empty the Trash too" if free < LITTLE_SPACE else ""
    place = f"{workspace.root} ({free / 1e9:.1f} GB free)"
    checks["workspace"] = {"value": place, "good": not advice, "advice": advice}
    checks["raw bars"] = {"value": ", ".join(raw) or "none: prepare --symbol DEMO makes a synthetic market"}
    return {name: {"good": True, "advice": "", **one} for name, one in checks.items()}
