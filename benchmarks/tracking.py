"""Seconds that W&B costs a training: mirrored offline, to a closed port, a black hole, a slow server, without a key.

    python benchmarks/tracking.py [--rows N] [--out FILE]

Each line is one JSON object. `delay_seconds` is the time to open the record, log and finish, compared with the same
with no mirror at all; `per_step_us` the price of one logged step; `warnings` what a user read of it; `same_bits`
whether a small model trained under that fault has the hash of one trained with no mirror. The faults are real sockets
on loopback: one that accepts and never answers, one that answers a byte a second.
"""

import argparse
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ml_factory.models.registry import build_model
from ml_factory.redaction import known_secrets
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.serialization import serialize_state
from ml_factory.tracking.tracker import Tracker
from ml_factory.tracking.wandb_process import wandb_mirror_mode

KEY = "f" * 40
CASES = ("off", "offline", "no key", "closed port", "black hole", "slow")
STEPS = 200


@contextmanager
def server(answers: bytes | None) -> Iterator[str]:
    """The address of a socket that accepts and never answers, or that gives a byte of an answer each second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept = []

        def answer(connection: socket.socket) -> None:
            for place in range(len(answers)):
                time.sleep(1)
                try:
                    connection.sendall(answers[place : place + 1])
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                if answers is not None:
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()


@contextmanager
def fault(case: str) -> Iterator[dict[str, str]]:
    """The environment of one case, with its server running."""
    online = {"WANDB_API_KEY": KEY, "ML_FACTORY_WANDB": "auto"}
    if case == "slow":
        with server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as address:
            yield {**online, "WANDB_BASE_URL": address}
    elif case == "black hole":
        with server(None) as address:
            yield {**online, "WANDB_BASE_URL": address}
    elif case == "closed port":
        yield {**online, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    else:
        yield {"ML_FACTORY_WANDB": {"no key": "auto"}.get(case, case)}


def measure(case: str, root: Path) -> dict:
    """In a process of its own, as a training is one."""
    root.mkdir(parents=True)
    with fault(case) as reported:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        env = {**kept, "NETRC": str(root / "netrc"), "XDG_CACHE_HOME": str(root / "cache"), **reported}
        words = [sys.executable, __file__, "--case", case, "--root", str(root)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def one_case(case: str, root: Path) -> dict:
    """Return the cost for a training: open, log to and finish a record; and the hash of a booster trained with it."""
    received: list[str] = []
    log = logging.getLogger("ml_factory")
    log.addHandler(
        type("Ear", (logging.Handler,), {"emit": lambda self, record: received.append(record.getMessage())})()
    )
    random = np.random.default_rng(0)
    x, y = random.normal(size=(600, 8)).astype(np.float32), random.integers(-1, 2, 600)
    model = build_model("lightgbm", seed=0, rounds=40, threads=1, patience=0)
    began = time.perf_counter()
    tracker = Tracker("run", {"rows": 600}, root / "log", root / "local")
    opened = time.perf_counter() - began
    model.fit(x, y, np.ones(600), validation=(x, y, np.ones(600)), callbacks=(tracker.log,))
    began = time.perf_counter()
    for step in range(1000, 1000 + STEPS):
        tracker.log(step, {"loss": 1 / step})
    logged = time.perf_counter() - began
    began = time.perf_counter()
    tracker.finish({"rows": 600})
    finished = time.perf_counter() - began
    mode = wandb_mirror_mode("auto")
    settled = tracker.wait_mirror(75)
    return {
        "case": case, "mode": mode, "open_seconds": round(opened, 3), "per_step_us": round(logged / STEPS * 1e6, 1),
        "finish_seconds": round(finished, 3), "delay_seconds": round(opened + logged + finished, 3),
        "mirror_ended_well": settled, "warnings": received,
        "bits": fingerprint_json(serialize_state(model.get_state()).hex())[:12],
        "key_in_files": sum(secret.encode() in path.read_bytes() for secret in known_secrets() or [KEY]
                            for path in root.rglob("*") if path.is_file()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(one_case(options.case, options.root)))
        return
    with tempfile.TemporaryDirectory() as folder:
        bits = None
        for number, case in enumerate(options.cases):
            reported = measure(case, Path(folder) / str(number))
            bits = bits or reported["bits"]
            print(json.dumps({"bench": "tracking", **reported, "same_bits": reported["bits"] == bits}), flush=True)


if __name__ == "__main__":
    main()
