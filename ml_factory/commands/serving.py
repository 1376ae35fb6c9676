"""Verb that answers requests with bundles: serve."""

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ml_factory.argument_checks import check_file_exists
from ml_factory.commands.options import parse_name_value_options
from ml_factory.commands.own_modules import OwnModules, import_own_modules
from ml_factory.errors import SettingsError, WorkspaceError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.models.setting_names import parse_setting_value
from ml_factory.storage.files import files

server = LazyModule("ml_factory.serving.server")
following = LazyModule("ml_factory.serving.follow")
guard_settings = LazyModule("ml_factory.inference.guard")
served_bundle = LazyModule("ml_factory.serving.served_bundle")
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class AddressOptions:
    """Address"""

    host: Annotated[str, Option("--host", help="Address to listen on; others than this machine's need a key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000
    no_key: Annotated[bool, Option("--no-key", help="Listen on --host without ML_FACTORY_API_KEY.")] = False
    as_json: Annotated[bool, Option("--json", help="Print the address and the bundles as JSON.")] = False


def serve(
    bundle: Annotated[list[Path], typer.Argument(help="Bundles, one of each symbol.")],
    address: AddressOptions,
    own_modules: OwnModules = None,
    state: Annotated[
        Path | None, Option("--state", help="Folder of the feeds' state; empty: it ends with the process.")
    ] = None,
    follow: Annotated[
        Path | None, Option("--follow", help="Answer the bars appended to this file instead; state in FILE.state.")
    ] = None,
    no_clock: Annotated[
        bool, Option("--no-clock", help="With --follow: bars are not compared with the clock.")
    ] = False,
    guard: Annotated[
        list[str] | None, Option("--guard", help="NAME=VALUE of the guard, such as drift=abstain. Several times.")
    ] = None,
) -> None:
    """Answer requests with bundles. Example: `python -m ml_factory serve DEMO-h20-xgboost.bundle`"""
    for path in bundle:
        _check_bundle_exists(path)
    import_own_modules(own_modules)
    guarded = _parse_guard(guard)
    if follow is not None:
        _follow(bundle, follow, state, guarded, live=not no_clock, as_json=address.as_json)
        return
    server.run_server(
        bundle, host=address.host, port=address.port, no_key=address.no_key, state=state,
        guard=guarded,
        announce=lambda facts: _print_address(facts, address.as_json),
    )  # fmt: skip


def _check_bundle_exists(path: Path) -> None:
    """Raise WorkspaceError for an absent bundle, with the nearest that there is, or how to make one."""
    if files.is_file(path):
        return
    found = [name for name in files.names(path.parent) if name.endswith(".bundle")] if path.parent.is_dir() else []
    made = "make one: python -m ml_factory export --help"
    if files.is_folder(path):
        held = [path.name + "/" + name for name in files.names(path) if name.endswith(".bundle")]
        raise WorkspaceError("Not a bundle, but a folder", where=path, wanted="the file of a bundle",
                             next_step=did_you_mean(path.name, held) or made)  # fmt: skip
    raise WorkspaceError("No such file", where=path, wanted="the file of a bundle",
                         next_step=did_you_mean(path.name, found) or made)  # fmt: skip


def _parse_guard(texts: list[str] | None) -> Any:
    """Return the settings of the guard with the fields of these texts NAME=VALUE. Raises SettingsError."""
    names = [field.name for field in fields(guard_settings.GuardSettings)]
    given = parse_name_value_options(texts or [], "--guard", "drift=abstain")
    for name in given:
        if name not in names:
            raise SettingsError("There is no such setting", where="--guard", got=name,
                                next_step=did_you_mean(name, names))  # fmt: skip
    return guard_settings.GuardSettings(**{name: parse_setting_value(text) for name, text in given.items()})


def _print_address(facts: dict, as_json: bool) -> None:
    names = ", ".join(f"{symbol} ({run})" for symbol, run in facts["bundles"].items())
    print(json.dumps(facts) if as_json else f"serving {names} at {facts['url']} (stop with Ctrl-C)", flush=True)


def _follow(bundles: list[Path], path: Path, state: Path | None, guard: Any, *, live: bool, as_json: bool) -> None:
    """Print an answer for each row that the bars appended to the file complete, until Ctrl-C."""
    if len(bundles) != 1:
        raise SettingsError("A file is followed with one bundle", where="--follow", got=f"{len(bundles)} bundles",
                            wanted="one", next_step="start a second process for another symbol")  # fmt: skip
    check_file_exists(path)
    served = served_bundle.ServedBundle.load(bundles[0], guard)
    with server.open_state_folder(state or path.with_name(f"{path.name}.state")) as folder:
        followed = following.FollowedFile(path, served, folder, live=live)
        following.follow_file(
            followed, poll_seconds=POLL_SECONDS,
            announce=lambda line: print(f"{served.symbol}: {line} (stop with Ctrl-C)", file=sys.stderr, flush=True),
            answer=lambda one: print(json.dumps(one) if as_json else following.answer_line(one), flush=True),
        )  # fmt: skip
