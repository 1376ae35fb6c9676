"""Model settings by the names of training guides and other libraries, and as one line of text.

=============================  ==================================  ==========================================
guide                          networks                            boosters and the linear model
=============================  ==================================  ==========================================
batch_size                     batch = batch_size x accumulation   none: all rows at once
gradient_accumulation_steps    accumulate                          none
learning_rate                  lr                                  learning_rate (the linear model has none)
num_epochs                     epochs                              rounds = num_epochs x block: an epoch in
                                                                   callbacks and histories is one block
mixed_precision                precision: no is fp32               none
gradient_checkpointing         recompute                           none
=============================  ==================================  ==========================================

As in Hugging Face's Trainer and Accelerate, `batch_size` is the number of rows in one forward pass, and a step descends
on batch_size x gradient_accumulation_steps rows.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ml_factory.argument_checks import check_values
from ml_factory.errors import SettingsError
from ml_factory.storage.json_values import parse_json

NETWORK_NAMES = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "mixed_precision": "precision",
    "gradient_checkpointing": "recompute",
    "batch_size": "batch",
    "gradient_accumulation_steps": "accumulate",
}
BLOCK_NAMES = {"num_epochs": "rounds"}
_PRECISIONS = ("no", "fp32", "bf16", "fp16", "auto")
_WORDS = {"True": True, "False": False, "None": None}
_BETWEEN = re.compile(r",(?![^\[]*\])")  # a comma that stands in no list


def rename_network_settings(where: str, given: Mapping, batch: int) -> dict:
    """Return the settings of a network by this project's names.

    where : the model, for messages.
    batch : default rows of a step.
    Raises SettingsError for an unusable value, or a setting that is given under both names.
    """
    own = _renamed(where, given, NETWORK_NAMES)
    if "mixed_precision" in given:
        check_values(given, mixed_precision=_PRECISIONS)
        own["precision"] = "fp32" if own["precision"] == "no" else own["precision"]
    if "gradient_checkpointing" in given and not isinstance(own["recompute"], bool):
        raise _refused(where, "gradient_checkpointing", own["recompute"], "True or False")
    if {"batch_size", "gradient_accumulation_steps"} & set(given):
        for name in ("batch", "accumulate"):
            if name in given:
                raise _twice(where, name, "batch_size or gradient_accumulation_steps")
        steps = _count(where, "gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1))
        own["batch"] = _count(where, "batch_size", given.get("batch_size", batch)) * steps
        own["accumulate"] = steps
    return own


def rename_tabular_settings(where: str, given: Mapping, block: int) -> dict:
    """Return the settings of a model that is trained in blocks, by this project's names.

    where : the model, for messages.
    block : default rounds of a block.
    Raises SettingsError as `rename_network_settings` does.
    """
    own = _renamed(where, given, BLOCK_NAMES)
    if "num_epochs" in given:
        own["rounds"] = _count(where, "num_epochs", given["num_epochs"]) * _count(
            where, "block", own.get("block", block)
        )
    return own


def parse_named_settings(text: str) -> dict[str, Any]:
    """Parse `batch_size=64, mixed_precision=bf16` to {"batch_size": 64, "mixed_precision": "bf16"}; "" is {}.

    Raises SettingsError for a part that is not NAME=VALUE, or a repeated name.
    """
    given = parse_name_value_texts(filter(str.strip, _BETWEEN.split(text)), "SETTINGS", "batch_size=64")
    return {name: parse_setting_value(value, f"SETTINGS, {name}") for name, value in given.items()}


def parse_name_value_texts(texts: Iterable[str], where: str, example: str) -> dict[str, str]:
    """Parse values by name from texts NAME=VALUE. Raises SettingsError for another text, or a repeated name.

    where, example : what the texts stand in, and one of them, for the message.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = (piece.strip() for piece in text.partition("="))
        if not (sign and re.fullmatch(r"[A-Za-z_][\w.]*", name)):
            raise SettingsError(
                "A setting is NAME=VALUE", where=where, got=repr(text), wanted=f"such as {example}",
                next_step="correct it; several in one text are separated by commas",
            )  # fmt: skip
        if name in found:
            raise SettingsError("A setting is given twice", where=where, got=name, next_step="leave one of them out")
        found[name] = value
    return found


def parse_setting_value(text: str, where: str) -> Any:
    """Parse a number, truth value, list or null as Python or JSON writes it; other texts are returned unchanged.

    where : what names the setting, for the message

    Raises SettingsError for a list or table that is not JSON.
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        return parse_json(text)
    except ValueError:
        if text.startswith(("[", "{")):
            raise SettingsError(
                "A list or table is written as JSON", where=where, got=text, wanted='["a", "b"] or {"a": 1}',
                next_step="quote it for the shell: 'features.custom=[\"name\"]'",
            ) from None  # fmt: skip
        return text.strip("'\"")


def _renamed(where: str, given: Mapping, names: Mapping[str, str]) -> dict:
    for name, own in names.items():
        if name in given and own in given:
            raise _twice(where, own, name)
    return {names.get(name, name): value for name, value in given.items()}


def _count(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refused(where, name, value, "an integer >= 1")
    return value


def _refused(where: str, name: str, value: Any, wanted: str) -> SettingsError:
    return SettingsError("Cannot train with this", where=f"{where}, {name}", got=repr(value), wanted=wanted)


def _twice(where: str, own: str, other: str) -> SettingsError:
    return SettingsError("A setting is given twice", where=where, got=f"{own} and {other}", next_step="leave one out")
