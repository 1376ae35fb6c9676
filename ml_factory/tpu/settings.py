"""Settings of a TPU slice: the guides' variables, read from the environment and from one flat YAML file."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ml_factory.argument_checks import read_yaml
from ml_factory.errors import SettingsError, did_you_mean

_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
# variable -> (default or None where it must be given, pattern of its value, what it is)
VARIABLES: dict[str, tuple[str | None, str, str]] = {
    "PROJECT_ID": (None, r"([a-z][a-z0-9.-]{0,30}:)?[a-z][a-z0-9-]{4,28}[a-z0-9]", "id of a Google Cloud project"),
    "TPU_NAME": (None, _NAME, "name of 1 to 40 small letters, digits and dashes"),
    "ZONE": (None, r"[a-z]+-[a-z]+[0-9]{1,2}-[a-z]", "zone, such as us-central2-b"),
    "ACCELERATOR_TYPE": (None, r"[a-z0-9]{2,12}-[0-9]{1,5}", "type, such as v4-32"),
    "BUCKET": (None, r"[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]", "name of a bucket, without gs://"),
    "RUNTIME_VERSION": ("", r"[a-z0-9][a-z0-9.-]{0,60}", "runtime version; empty: the one of the type"),
    "SPOT": ("false", r"true|false", "true or false"),
    "VALID_UNTIL": ("", r"[1-9][0-9]{0,5}[smhd]", "duration, such as 6h, after which a waiting request ends"),
    "NETWORK": ("", r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "name of a network; empty: default"),
    "SUBNETWORK": ("", r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "name of a subnetwork"),
    "INTERNAL_IPS": ("false", r"true|false", "true or false"),
    "SERVICE_ACCOUNT": ("", r"[a-z0-9-]{1,63}@[a-z0-9.-]{1,100}", "e-mail of a service account"),
    "WANDB_SECRET": ("", r"[A-Za-z0-9_-]{1,255}", "name of a secret in Secret Manager"),
    "WANDB_API_KEY": ("", r"[A-Za-z0-9_-]{8,200}", "key; it goes into Secret Manager"),
    "CODE_DIR": (".", r"[^\0\n]{1,4096}", "folder of a git checkout"),
    "CONFIG": ("", r"[^\0\n]{1,4096}", "file of the training's settings"),
    "COMMAND": (
        "python recipes/train.py --config config.yaml --device tpu",
        r"[^\0\n]{1,4000}",
        "one command, no shell",
    ),
    "EXTRAS": ("train,track,gs,language,vision", r"[a-z]+(,[a-z]+)*", "extras of the library, with commas"),
    "TORCH_VERSION": ("2.9.0", r"[0-9]+(\.[0-9]+){1,2}", "version of torch and torch_xla"),
    "XLA_USE_BF16": ("", r"[01]", "1 or 0"),
    "REQUESTS": (
        "20",
        r"[1-9][0-9]{0,3}",
        "most requests for the slice by one command, the first and those after a preemption",
    ),
}
RETIRED = {
    "XRT_TPU_CONFIG": "XRT is gone: workers run with PJRT_DEVICE=TPU, which `tpu setup` sets",
    "TF_VERSION": "ctpu is gone: RUNTIME_VERSION names the software of a slice",
}
# word of a command of older guides -> what replaced it
RETIRED_WORDS = {
    "torch_xla.distributed.xla_dist": "xla_dist is gone: `tpu setup` starts COMMAND on all workers",
    "--restart-tpuvm-pod-server": "XRT is gone, and no server has to be restarted",
    "ctpu": "ctpu is gone: `tpu setup`",
    "conda": "conda activate torch-xla-1.6 is gone: `tpu setup` installs TORCH_VERSION on all workers",
}
_ALIASES = {"XLA_USEBF16": "XLA_USE_BF16", "WANDB_API_KEY_SECRET": "WANDB_SECRET"}


# generation -> (what its number counts: TensorCores, 2 a chip, or chips; most chips of one worker; runtime version)
# cloud.google.com/tpu/docs/v2 to v6e, and cloud.google.com/tpu/docs/runtimes
GENERATIONS = {
    **dict.fromkeys(("v2", "v3", "v4"), (2, 4, "tpu-ubuntu2204-base")), "v5p": (2, 4, "v2-alpha-tpuv5"),
    "v5litepod": (1, 8, "v2-alpha-tpuv5-lite"), "v6e": (1, 8, "v2-alpha-tpuv6e"),
}  # fmt: skip


@dataclass(frozen=True)
class SliceSettings:
    """Settings of one slice.

    values : text by variable, without the key.
    key : API key of W&B, or "".
    """

    values: Mapping[str, str]
    key: str = field(default="", repr=False)

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    @property
    def chips(self) -> int:
        """Chips of the slice: in v4-32 the number counts TensorCores, in v6e-8 chips."""
        generation, _, number = self["ACCELERATOR_TYPE"].partition("-")
        return max(int(number) // GENERATIONS[generation][0], 1)

    @property
    def workers(self) -> int:
        """Workers of the slice; a larger one has 4 chips on each."""
        generation = self["ACCELERATOR_TYPE"].partition("-")[0]
        return 1 if self.chips <= GENERATIONS[generation][1] else self.chips // 4

    @property
    def secret(self) -> str:
        """Name of the secret with the key of W&B, or "" without one."""
        return self["WANDB_SECRET"] or (f"{self['TPU_NAME']}-wandb-api-key" if self.key else "")

    def command_words(self) -> list[str]:
        """Return the words of the training's command. Raises SettingsError for an open quote."""
        try:
            return shlex.split(self["COMMAND"])
        except ValueError as error:
            raise SettingsError("This command cannot be read", where="COMMAND", got=error) from None


def read_settings(path: Path | None) -> SliceSettings:
    """Return the settings of the environment and of the file, which wins. Raises SettingsError, FileError."""
    given = {_ALIASES.get(name, name): os.environ[name] for name in (*VARIABLES, *_ALIASES) if os.environ.get(name)}
    given |= _read_file(path) if path is not None else {}
    where = path or "environment"
    missing = [name for name, (default, _, _) in VARIABLES.items() if default is None and not given.get(name)]
    if missing:
        raise SettingsError("Settings of the slice are missing", where=where, got="no " + ", ".join(missing),
                            next_step="export them, or write NAME: value lines and give --config FILE")  # fmt: skip
    values = {name: given.get(name) or default or "" for name, (default, _, _) in VARIABLES.items()}
    for name, text in values.items():
        default, pattern, wanted = VARIABLES[name]
        if (text or default) and not re.fullmatch(pattern, text):
            got = "[a text of another form]" if name == "WANDB_API_KEY" else repr(text[:80])
            raise SettingsError(f"{name} cannot be used", where=where, got=got, wanted=wanted)
    kind = re.sub("^v5e-", "v5litepod-", values["ACCELERATOR_TYPE"])
    if kind.partition("-")[0] not in GENERATIONS:
        raise SettingsError("Unknown accelerator type", where="ACCELERATOR_TYPE", got=repr(kind),
                            wanted=", ".join(f"{known}-N" for known in GENERATIONS), next_step="for example v4-32 or"
                            " v6e-8")  # fmt: skip
    values |= {"ACCELERATOR_TYPE": kind,
               "RUNTIME_VERSION": values["RUNTIME_VERSION"] or GENERATIONS[kind.partition("-")[0]][2]}  # fmt: skip
    settings = SliceSettings(values, values.pop("WANDB_API_KEY"))
    if settings.key and settings.key in values["COMMAND"]:
        raise SettingsError("A key never stands on a command line", where="COMMAND", next_step="leave it out")
    for word in settings.command_words():
        if word in RETIRED_WORDS:
            raise SettingsError(RETIRED_WORDS[word], where="COMMAND", got=word, next_step="give the training alone")
    return settings


def _read_file(path: Path) -> dict[str, str]:
    """Return the values of a flat YAML file by name, all of them as they are written. Raises SettingsError."""
    found: dict[str, str] = {}
    for given, value in read_yaml(path, "lines NAME: value", texts=True).items():  # TORCH_VERSION 2.10 is no number
        name = _ALIASES.get(str(given).upper(), str(given).upper())
        if name in RETIRED:
            raise SettingsError(f"{name} is retired: {RETIRED[name]}", where=path)
        if name not in VARIABLES or not isinstance(value, str):
            raise SettingsError("There is no such setting", where=path, got=repr(given)[:80], wanted="NAME: value",
                                next_step=did_you_mean(name, sorted(VARIABLES)))  # fmt: skip
        found[name] = value.lower() if value.lower() in ("true", "false") else value
    return found
