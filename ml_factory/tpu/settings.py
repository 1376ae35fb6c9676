"""Settings of a TPU slice: the guides' variables, read from the environment and from one flat YAML file."""

import math
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ml_factory.argument_checks import check_file_exists
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.storage.files import files
from ml_factory.tpu.accelerators import Accelerator, parse_accelerator

_LARGEST = 1 << 16  # bytes of a settings file
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
    "ALLOW_SSH_FROM": ("", r"[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}", "address range that may use ssh"),
    "CONFIG_SSH": ("false", r"true|false", "true or false"),
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
    "PRICE_PER_CHIP_HOUR": ("", r"[0-9]{1,4}(\.[0-9]{1,4})?", "price of a chip for an hour"),
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

    def is_on(self, name: str) -> bool:
        """Return whether a variable of true or false is true."""
        return self.values[name] == "true"

    @property
    def accelerator(self) -> Accelerator:
        """Facts of the accelerator type."""
        return parse_accelerator(self["ACCELERATOR_TYPE"])

    @property
    def request(self) -> str:
        """Name of the queued resource, as in the guide: TPU_NAME-qr."""
        return f"{self['TPU_NAME']}-qr"

    @property
    def region(self) -> str:
        """Region of the zone, where the bucket lies."""
        return self["ZONE"].rpartition("-")[0]

    @property
    def secret(self) -> str:
        """Name of the secret with the key of W&B, or "" without one."""
        return self["WANDB_SECRET"] or (f"{self['TPU_NAME']}-wandb-api-key" if self.key else "")

    @property
    def price(self) -> float | None:
        """Price of a chip for an hour, or None."""
        text = self["PRICE_PER_CHIP_HOUR"]
        return float(text) if text and math.isfinite(float(text)) else None

    def command_words(self) -> list[str]:
        """Return the words of the training's command. Raises SettingsError for an open quote."""
        try:
            return shlex.split(self["COMMAND"])
        except ValueError as error:
            raise SettingsError("This command cannot be read", where="COMMAND", got=error) from None


def read_settings(path: Path | None) -> SliceSettings:
    """Return the settings of the environment and of the file, which wins. Raises SettingsError, BarsError."""
    given = {_ALIASES.get(name, name): os.environ[name] for name in (*VARIABLES, *_ALIASES) if os.environ.get(name)}
    if path is not None:
        given |= parse_flat_yaml(
            files.read(check_file_exists(path.expanduser()), _LARGEST).decode(errors="replace"), path
        )
    where = path or "environment"
    missing = [name for name, (default, _, _) in VARIABLES.items() if default is None and not given.get(name)]
    if missing:
        raise SettingsError(
            "Settings of the slice are missing",
            where=where,
            got="no " + ", ".join(missing),
            next_step="export them, or write NAME: value lines and give --config FILE",
        )
    values = {name: given.get(name) or default or "" for name, (default, _, _) in VARIABLES.items()}
    for name, text in values.items():
        _check_value(name, text, where)
    if not 1 <= len(values["TPU_NAME"]) <= 40:
        raise SettingsError("This name is too long", where="TPU_NAME", wanted="40 characters at most")
    key = values.pop("WANDB_API_KEY")
    settings = SliceSettings(values, key)
    values["ACCELERATOR_TYPE"] = settings.accelerator.kind
    values["RUNTIME_VERSION"] = values["RUNTIME_VERSION"] or settings.accelerator.runtime
    if key and key in values["COMMAND"]:
        raise SettingsError("A key never stands on a command line", where="COMMAND", next_step="leave it out")
    for word in settings.command_words():
        if word in RETIRED_WORDS:
            raise SettingsError(RETIRED_WORDS[word], where="COMMAND", got=word, next_step="give the training alone")
    if not settings.command_words():
        raise SettingsError("There is no command", where="COMMAND", next_step="name the training")
    return settings


def _check_value(name: str, text: str, where: object) -> None:
    default, pattern, wanted = VARIABLES[name]
    if text == "" and default == "":
        return
    if not re.fullmatch(pattern, text):
        got = "[a text of another form]" if name == "WANDB_API_KEY" else repr(text[:80])
        raise SettingsError(f"{name} cannot be used", where=where, got=got, wanted=wanted)


def parse_flat_yaml(text: str, where: object) -> dict[str, str]:
    """Return the values of lines NAME: value, with comments and quotes, by name. Raises SettingsError.

    Of YAML, only a flat table of scalars is read: no lists, tables, anchors, tags or texts of several lines.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        match = re.fullmatch(
            r"""([A-Za-z_]\w{0,60})[ ]*:(?:[ ]+(?:"([^"\\]*)"|"""
            r"""'([^']*)'|([^\s"'\[{&*!|>%@`#-].*?|-?[\w.][^#]*?)))?[ ]*(?:[ ]\#.*)?""",
            line,
        )
        place = f"{where}, line {number}"
        if match is None:
            raise SettingsError("This line is no setting", where=place, got=repr(line[:80]), wanted="NAME: value")
        name = match[1].upper()
        if name in RETIRED:
            raise SettingsError(f"{name} is retired: {RETIRED[name]}", where=place)
        name = _ALIASES.get(name, name)
        if name not in VARIABLES:
            raise SettingsError(
                "There is no such setting", where=place, got=match[1], next_step=did_you_mean(name, sorted(VARIABLES))
            )
        if name in found:
            raise SettingsError("This setting stands twice", where=place, got=name)
        value = next((one for one in match.groups()[1:] if one is not None), "")
        found[name] = value.lower() if value.lower() in ("true", "false") else value
    return found
