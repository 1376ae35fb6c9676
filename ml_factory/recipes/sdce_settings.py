"""Settings of recipe sdce: four sections as in its YAML file, and the flags that override them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ml_factory.argument_checks import check_file_exists, check_seed
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.process_identity import wants_bfloat16
from ml_factory.storage.files import files
from ml_factory.storage.json_values import check_nesting

yaml = LazyModule("yaml")

_LARGEST = 1 << 16  # bytes of a YAML file
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "tpu": "xla"}
PRECISIONS = {"auto": "auto", "no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
LOSSES = ("surrogate", "kl", "standard")
CACHES = ("none", "float32", "float16")


@dataclass(frozen=True)
class ModelSection:
    """The model that is trained.

    name_or_path : builtin:tiny, small or medium; a folder; or a name at the Hugging Face hub.
    dtype : number format of the steps where mixed_precision is auto; weights in training stay float32.
    """

    name_or_path: str = "gpt2"
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    init_from_scratch: bool = False


@dataclass(frozen=True)
class SurrogateSection:
    """The frozen second model, and its part of the loss.

    dtype : of its weights and its forward pass.
    cache : none computes its tokens in each step; float32 or float16 once, on disk.
    cache_dir : folder of the caches of tokens and of the surrogate; empty for the user's cache folder.
    rows_at_once : sequences of one forward pass of the surrogate; 0 for 1 on a CPU, 4 elsewhere.
    """

    name_or_path: str = "Qwen/Qwen3-0.6B"
    dtype: str = "bfloat16"
    k: int = 30
    probability_threshold: float = 0.02
    loss_weight_initial: float = 1.0
    loss_weight_final: float = 0.0
    cache: str = "none"
    cache_dir: str = ""
    rows_at_once: int = 0


@dataclass(frozen=True)
class DataSection:
    """The text.

    dataset_name : a .txt, .jsonl or .parquet file, a folder of them, gs://bucket/file, or a data set of the hub.
    dataset_config, split : of the hub's data set.
    max_tokens : tokens that are read at most, 0 for all.
    validation_share : share of the sequences, the last ones, that are held out.
    """

    dataset_name: str = "wikitext"
    dataset_config: str = ""
    split: str = "train"
    text_column: str = "text"
    max_seq_length: int = 1024
    max_tokens: int = 0
    validation_share: float = 0.05


@dataclass(frozen=True)
class TrainingSection:
    """The training. output_dir : folder or gs://bucket/prefix of checkpoints, log and model."""

    device: str = "auto"
    tpu_cores: int = 0
    tpu_num_hosts: int = 1
    num_epochs: int = 3
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 4
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    warmup_ratio: float = 0.1
    max_grad_norm: float = 1.0
    mixed_precision: str = "auto"
    loss_type: str = "surrogate"
    patience: int = 0
    seed: int = 0
    threads: int = 0
    log_steps: int = 50
    save_seconds: float = 60.0
    output_dir: str = "./outputs"
    wandb_project: str = ""


@dataclass(frozen=True)
class SdceSettings:
    """All settings of one training."""

    model: ModelSection = field(default_factory=ModelSection)
    surrogate: SurrogateSection = field(default_factory=SurrogateSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)

    def __post_init__(self) -> None:
        for section in ("model", "surrogate", "data", "training"):
            _check_types(section, getattr(self, section))
        _check_numbers(self)
        _check_choices(self)
        check_seed(self.training.seed)

    @property
    def needs_surrogate(self) -> bool:
        """False for the standard loss."""
        return self.training.loss_type != "standard"

    @property
    def precision(self) -> str:
        """Precision of the steps, as of `TrainSpec`."""
        named = PRECISIONS[self.training.mixed_precision]
        return {"bfloat16": "bf16", "float16": "fp16"}.get(self.model.dtype, "auto") if named == "auto" else named

    def with_values(self, values: Mapping[str, Mapping[str, Any]], where: object = None) -> "SdceSettings":
        """Return the settings with other values, by section and name. Raises SettingsError for an unknown one."""
        sections = {item.name: getattr(self, item.name) for item in fields(self)}
        for section, given in values.items():
            if section not in sections:
                raise _unknown("section", section, sections, where)
            if not isinstance(given, Mapping):
                raise SettingsError("A section is a table of names and values", where=f"{section} in {where}",
                                    got=repr(given))  # fmt: skip
            known = {item.name: item.type for item in fields(sections[section])}
            for name in given:
                if name not in known:
                    raise _unknown(f"key of section {section}", name, known, where)
            changed = {name: _converted(value, known[name]) for name, value in given.items()}
            sections[section] = replace(sections[section], **changed)
        return SdceSettings(**sections)

    def identity(self) -> dict[str, Any]:
        """Return what makes another run when it changes: all but the machine's own settings."""
        elsewhere = {
            "training": ("device", "tpu_cores", "tpu_num_hosts", "threads", "log_steps", "save_seconds",
                         "output_dir", "wandb_project",
                         "per_device_train_batch_size", "gradient_accumulation_steps"),
            "surrogate": ("cache_dir",), "model": ("gradient_checkpointing",),
        }  # fmt: skip
        return {
            section: {name: value for name, value in values.items() if name not in elsewhere.get(section, ())}
            for section, values in asdict(self).items()
            if section != "surrogate" or self.needs_surrogate
        }


# Flag of the guide -> section and key.
FLAGS = {
    "base_model": ("model", "name_or_path"),
    "gradient_checkpointing": ("model", "gradient_checkpointing"),
    "init_from_scratch": ("model", "init_from_scratch"),
    "surrogate_model": ("surrogate", "name_or_path"),
    "surrogate_k": ("surrogate", "k"),
    "probability_threshold": ("surrogate", "probability_threshold"),
    "surrogate_loss_weight_initial": ("surrogate", "loss_weight_initial"),
    "surrogate_loss_weight_final": ("surrogate", "loss_weight_final"),
    "surrogate_cache": ("surrogate", "cache"),
    "cache_dir": ("surrogate", "cache_dir"),
    "dataset": ("data", "dataset_name"),
    "dataset_config": ("data", "dataset_config"),
    "max_seq_length": ("data", "max_seq_length"),
    "max_tokens": ("data", "max_tokens"),
    "device": ("training", "device"),
    "tpu_cores": ("training", "tpu_cores"),
    "tpu_num_hosts": ("training", "tpu_num_hosts"),
    "num_epochs": ("training", "num_epochs"),
    "batch_size": ("training", "per_device_train_batch_size"),
    "gradient_accumulation_steps": ("training", "gradient_accumulation_steps"),
    "learning_rate": ("training", "learning_rate"),
    "mixed_precision": ("training", "mixed_precision"),
    "loss_type": ("training", "loss_type"),
    "seed": ("training", "seed"),
    "output_dir": ("training", "output_dir"),
    "wandb_project": ("training", "wandb_project"),
}


def sdce_settings(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> SdceSettings:
    """Return the defaults, overridden by the YAML file, overridden by the flags that are given (not None).

    XLA_USE_BF16=1 in the environment stands for mixed_precision bf16 where neither names a precision.

    flags : by name, with underscores; `standard_training` stands for loss_type standard.
    """
    settings = SdceSettings() if config is None else SdceSettings().with_values(read_yaml_sections(config), config)
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if given.pop("standard_training", False):
        if given.get("loss_type", "standard") != "standard":
            raise SettingsError("Two losses at once", where="standard_training", got=f"loss_type {given['loss_type']}",
                                next_step="leave one of the two flags out")  # fmt: skip
        given["loss_type"] = "standard"
    values: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        section, key = FLAGS[name]
        values.setdefault(section, {})[key] = value
    settings = settings.with_values(values, "the flags")
    if settings.training.mixed_precision == "auto" and wants_bfloat16():
        settings = settings.with_values({"training": {"mixed_precision": "bf16"}})
    return settings


def read_yaml_sections(path: Path) -> dict[str, Any]:
    """Read a YAML file of sections. Raises SettingsError."""
    text = files.read(check_file_exists(path.expanduser()), _LARGEST).decode(errors="replace")
    try:
        table = yaml.safe_load(text)
        check_nesting(table)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError("These settings cannot be read", where=path, got=" ".join(str(error).split())[:200],
                            wanted="YAML with sections model, surrogate, data, training") from None  # fmt: skip
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise SettingsError("These are no settings", where=path, got=type(table).__name__, wanted="sections by name")
    return {str(name): value for name, value in table.items() if value is not None}


def _unknown(what: str, name: object, known: Mapping[str, object], where: object) -> SettingsError:
    return SettingsError(f"There is no such {what}", where=where, got=repr(name), wanted=", ".join(known),
                         next_step=did_you_mean(str(name), known))  # fmt: skip


def _converted(value: object, kind: object) -> object:
    """Return a number that YAML reads as a text, such as 1e-4, or as an integer, as the number that is wanted."""
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if kind is float and type(value) is int else value


def _check_types(section: str, values: object) -> None:
    for item in fields(values):  # type: ignore[arg-type]
        value = getattr(values, item.name)
        if type(value) is not item.type:
            wanted = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}[item.type]
            raise SettingsError("A value of another kind", where=f"{section}.{item.name}", got=repr(value),
                                wanted=wanted)  # fmt: skip


def _check_numbers(settings: SdceSettings) -> None:
    surrogate, data, training = settings.surrogate, settings.data, settings.training
    least = {
        "surrogate.k": (surrogate.k, 1), "surrogate.rows_at_once": (surrogate.rows_at_once, 0),
        "data.max_seq_length": (data.max_seq_length, 2), "data.max_tokens": (data.max_tokens, 0),
        "training.tpu_cores": (training.tpu_cores, 0), "training.tpu_num_hosts": (training.tpu_num_hosts, 1),
        "training.per_device_train_batch_size": (training.per_device_train_batch_size, 1),
        "training.gradient_accumulation_steps": (training.gradient_accumulation_steps, 1),
        "surrogate.loss_weight_initial": (surrogate.loss_weight_initial, 0),
        "surrogate.loss_weight_final": (surrogate.loss_weight_final, 0),
    }  # fmt: skip
    for name, (value, low) in least.items():
        if not low <= value < float("inf"):
            raise SettingsError("Cannot train with this", where=name, got=value, wanted=f"{low} or more")
    for name, share, low in (
        ("surrogate.probability_threshold", surrogate.probability_threshold, 0),
        ("data.validation_share", data.validation_share, 1e-6),
    ):
        if not low <= share < 1:
            raise SettingsError("Cannot train with this", where=name, got=share, wanted="a share below 1")


def _check_choices(settings: SdceSettings) -> None:
    training = settings.training
    for name, value, known in (
        ("model.dtype", settings.model.dtype, DTYPES), ("surrogate.dtype", settings.surrogate.dtype, DTYPES),
        ("surrogate.cache", settings.surrogate.cache, CACHES), ("training.device", training.device, DEVICES),
        ("training.mixed_precision", training.mixed_precision, PRECISIONS),
        ("training.loss_type", training.loss_type, LOSSES),
    ):  # fmt: skip
        if value not in known:
            raise SettingsError("Unknown value", where=name, got=repr(value), wanted=", ".join(known))
    if training.device == "tpu" and (
        settings.precision == "fp16" or (settings.needs_surrogate and settings.surrogate.dtype == "float16")
    ):
        raise SettingsError("A TPU has no fp16", where="training.mixed_precision", got="fp16", wanted="bf16 or no",
                            next_step="--mixed_precision bf16; dtype bfloat16 of both models")  # fmt: skip
