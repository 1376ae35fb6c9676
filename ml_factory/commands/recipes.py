"""Verb of the trainings of other fields: recipe NAME. Each recipe's command is imported when it is called."""

import importlib
import os
from typing import Any

import typer
from typer.core import TyperGroup

from ml_factory.cli_output import stderr_console
from ml_factory.commands.dataclass_options import expand_options

# name -> module whose function of the same name is the command; it imports nothing heavy by itself
RECIPES = {
    "shards": "ml_factory.commands.recipe_shards",
    "resnet50": "ml_factory.commands.recipe_resnet50",
    "sdce": "ml_factory.commands.recipe_sdce",
    "t5": "ml_factory.commands.recipe_t5",
    "compress": "ml_factory.commands.recipe_compress",
}


class RecipeGroup(TyperGroup):
    """The recipes as commands, imported by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(RECIPES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in RECIPES:
            return None
        if retired := sorted(name for name in os.environ if name.startswith("XRT_")):
            stderr_console.out(
                f"{', '.join(retired)}: XRT is gone, this is ignored; a TPU is used with PJRT_DEVICE=TPU"
            )
        module = importlib.import_module(RECIPES[cmd_name])
        own = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        own.command(cmd_name, no_args_is_help=False)(expand_options(getattr(module, cmd_name)))
        return typer.main.get_command(own)


app = typer.Typer(
    cls=RecipeGroup, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown",
    # --num_epochs and --num-epochs are one option
    context_settings={"token_normalize_func": lambda word: word.replace("_", "-")},
)  # fmt: skip


@app.callback()
def recipe() -> None:
    """Train one of the recipes: their data, networks and losses on the library's own loop, devices and checkpoints.

    Flags with dashes or underscores; --help after the recipe's name lists them, --json and --workspace among them.
    Example: `python -m ml_factory recipe shards`
    """
