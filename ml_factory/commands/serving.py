"""Verb that answers requests with bundles: serve."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from ml_factory.argument_checks import check_file_exists
from ml_factory.commands.options import Config, OwnModules, Texts, parse_name_value_options
from ml_factory.errors import SettingsError, did_you_mean
from ml_factory.interrupt import Interrupted
from ml_factory.lazy_module import LazyModule
from ml_factory.models.setting_names import parse_setting_value
from ml_factory.own_modules import import_own_modules

app = LazyModule("ml_factory.serving.app")
following = LazyModule("ml_factory.serving.follow")
guard_settings = LazyModule("ml_factory.inference.guard")
feed = LazyModule("ml_factory.serving.feed")
POLL_SECONDS = 0.5
_HOST, _PORT = "127.0.0.1", 8000


def serve(
    bundle: Annotated[list[Path], Parameter(negative=())], *, own_modules: OwnModules = (), state: Path | None = None,
    follow: Path | None = None, no_clock: bool = False, guard: Texts = (), host: str = _HOST,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = _PORT, no_key: bool = False,
    as_json: Annotated[bool, Parameter("--json")] = False, config: Config = None,
) -> None:  # fmt: skip
    """Answer requests with bundles. Example: `python -m ml_factory serve DEMO-h20-xgboost.bundle`

    Args:
        bundle: Bundles, one of each symbol.
        state: Folder of the feeds' state; empty: it ends with the process.
        follow: Answer the bars appended to this file instead; state in FILE.state.
        no_clock: With --follow: bars are not compared with the clock.
        guard: NAME=VALUE of the guard, such as drift=abstain. Several times.
        host: Address to listen on; others than this machine's need a key.
        port: 0 takes a free one.
        no_key: Listen on --host without ML_FACTORY_API_KEY.
        as_json: Print the address and the bundles as JSON.
    """
    for path in bundle:
        check_file_exists(path, "the file of a bundle", "python -m ml_factory export writes one from the workspace")
    if no_clock if follow is None else (host, port, no_key) != (_HOST, _PORT, False):
        raise SettingsError(
            "These options do not belong together", where="--follow", got=follow or "none, with --no-clock",
            wanted="--no-clock with --follow; --host, --port and --no-key without", next_step="leave one out",
        )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that share one row wait for each other
    import_own_modules(own_modules)
    guarded = _parse_guard(guard)
    if follow is not None:
        _follow(bundle, follow, state, guarded, live=not no_clock, as_json=as_json)
        return
    app.run_server(
        bundle, host=host, port=port, no_key=no_key, state=state, guard=guarded,
        announce=lambda facts: _print_address(facts, as_json),
    )  # fmt: skip


def _parse_guard(texts: Sequence[str]) -> Any:
    """Return the settings of the guard with the fields of these texts NAME=VALUE. Raises SettingsError."""
    names = [field.name for field in fields(guard_settings.GuardSettings)]
    given = parse_name_value_options(texts, "--guard", "drift=abstain")
    for name in given:
        if name not in names:
            raise SettingsError("There is no such setting", where="--guard", got=name,
                                next_step=did_you_mean(name, names))  # fmt: skip
    values = {name: parse_setting_value(text, f"--guard {name}") for name, text in given.items()}
    return guard_settings.GuardSettings(**values)


def _print_address(facts: dict, as_json: bool) -> None:
    names = ", ".join(f"{symbol} ({run})" for symbol, run in facts["bundles"].items())
    print(json.dumps(facts) if as_json else f"serving {names} at {facts['url']} (stop with Ctrl-C)", flush=True)


def _follow(bundles: list[Path], path: Path, state: Path | None, guard: Any, *, live: bool, as_json: bool) -> None:
    """Print an answer for each row that the bars appended to the file complete, until Ctrl-C."""
    if len(bundles) != 1:
        raise SettingsError("A file is followed with one bundle", where="--follow", got=f"{len(bundles)} bundles",
                            wanted="one", next_step="start a second process for another symbol")  # fmt: skip
    check_file_exists(path)
    served = feed.ServedBundle.load(bundles[0], guard)
    with app.open_state_folder(state or path.with_name(f"{path.name}.state")) as folder, suppress(Interrupted):
        followed = following.FollowedFile(path, served, folder, live=live)
        following.follow_file(
            followed, poll_seconds=POLL_SECONDS,
            announce=lambda line: print(f"{served.symbol}: {line} (stop with Ctrl-C)", file=sys.stderr, flush=True),
            answer=lambda one: print(json.dumps(one) if as_json else following.answer_line(one), flush=True),
        )  # fmt: skip
