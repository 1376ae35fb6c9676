"""Verb that answers requests with bundles: serve."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ml_factory.argument_checks import check_file_exists
from ml_factory.lazy_module import LazyModule

server, service_settings = LazyModule("ml_factory.serving.server"), LazyModule("ml_factory.serving.service_settings")
guard_settings = LazyModule("ml_factory.inference.guard.settings")


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
    state: Annotated[
        Path | None, Option("--state", help="Folder of the streams' state; empty: it ends with the process.")
    ] = None,
) -> None:
    """Answer requests with bundles. Example: `python -m ml_factory serve DEMO-h20-xgboost.bundle`"""
    for path in bundle:
        check_file_exists(path)
    server.run_server(
        bundle, host=address.host, port=address.port, no_key=address.no_key, state=state,
        limits=service_settings.ServiceLimits(), guard=guard_settings.GuardSettings(),
        announce=lambda facts: _print_address(facts, address.as_json),
    )  # fmt: skip


def _print_address(facts: dict, as_json: bool) -> None:
    names = ", ".join(f"{symbol} ({run})" for symbol, run in facts["bundles"].items())
    print(json.dumps(facts) if as_json else f"serving {names} at {facts['url']} (stop with Ctrl-C)", flush=True)
