"""Boosters trained in blocks against one call, resumed against uninterrupted, and prediction against LightGBM's own.

    python -m benchmarks.boosters                 # 60,000 rows x 50 columns, 1,000 rounds: half an hour on one core
    python -m benchmarks.boosters --rounds 200 --rows 20000

Both sides of a comparison take turns of 100 rounds, so whatever else the machine does, it does to both. Seconds are of
the processor. The straight side is the library's own training call on the same matrices, its losses counted too.
"""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator

import catboost
import lightgbm as lgb
import numpy as np
import xgboost as xgb

from benchmarks.measure import best, digits, in_turns, print_json
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.models.registry import build_model
from ml_factory.models.tabular import TabularModel
from ml_factory.models.tabular_data import check_tabular_rows
from ml_factory.seeding import derive_seed
from ml_factory.storage.serialization import serialize_state

TURN = 100  # rounds


def market(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x with missing values, three classes with a weak interaction, weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    y = np.digitize(x[:, 0] + x[:, 1] * x[:, 2] + 2 * rng.normal(size=rows), [-0.9, 0.9]) - 1
    x[rng.random(x.shape) < 0.02] = np.nan
    return x, y, rng.uniform(0.2, 2, rows)


def in_blocks(model: TabularModel, train, valid, bins) -> Iterator[None]:
    """Our training, giving way every `TURN` rounds."""
    spec = model.settings
    grower = model._open(spec, train, valid, bins)
    for first in range(0, spec.rounds, spec.block):
        grower.grow(first, first + spec.block, derive_seed(spec.seed, model.name, "block", first // spec.block))
        if (first + spec.block) % TURN == 0:
            yield
    grower.close()


def xgboost_straight(grower, bins, rounds: int) -> Iterator[None]:
    booster, evals = xgb.Booster({**grower.params, "seed": 1}, bins), list(zip(bins, ("train", "valid"), strict=True))
    for number in range(rounds):
        booster.update(bins[0], number)
        booster.eval_set(evals, number)
        if (number + 1) % TURN == 0:
            yield


def lightgbm_straight(grower, bins, rounds: int) -> Iterator[None]:
    for part in bins:
        part.set_field("init_score", None)
    booster = lgb.Booster({**grower.params, "bagging_seed": 1}, bins[0]).add_valid(bins[1], "valid")
    for number in range(rounds):
        booster.update()
        booster.eval_train(), booster.eval_valid()
        if (number + 1) % TURN == 0:
            yield


def taken(turns: Iterator[None]) -> Callable[[], float | None]:
    """Processor seconds of the next turn, None after the last."""

    def turn() -> float | None:
        began = time.process_time()
        more = next(turns, turns) is None
        return time.process_time() - began if more else None

    return turn


def blockwise(name: str, rows: int, columns: int, rounds: int) -> None:
    """Compare blocks of ten with one training of as many rounds."""
    x, y, w = market(rows, columns)
    cut = rows * 5 // 6
    train, valid = check_tabular_rows(x[:cut], y[:cut], w[:cut]), check_tabular_rows(x[cut:], y[cut:], w[cut:])
    model = build_model(name, rounds=rounds, patience=0, threads=1)
    # Each its own matrices: a block sets scores in them.
    ours, theirs = (model._bin(model.settings, train, valid) for _ in range(2))
    grower = model._open(model.settings, train, valid, theirs)
    if name == "catboost":  # it cannot be stepped: whole trainings after each other
        blocks = sum(iter(taken(in_blocks(model, train, valid, ours)), None))
        spent = {"blocks": [blocks], "straight": [catboost_straight(grower, theirs, rounds)]}
    else:
        straight = {"xgboost": xgboost_straight, "lightgbm": lightgbm_straight}[name](grower, theirs, rounds)
        sides = {"blocks": taken(in_blocks(model, train, valid, ours)), "straight": taken(straight)}
        spent = {side: [] for side in sides}
        for _ in range(rounds // TURN):
            for side, turn in sides.items():
                spent[side].append(turn())
    grower.close()
    blocks, straight = sum(spent["blocks"]), sum(spent["straight"])
    print_json(
        benchmark="boosters.blockwise", model=name, rows=cut, columns=columns, rounds=rounds, cpu_s=digits(blocks),
        straight_cpu_s=digits(straight), ratio=digits(blocks / straight, 3),
        last_turn_ratio=digits(spent["blocks"][-1] / spent["straight"][-1], 3), wanted="at most 1.15",
    )  # fmt: skip


def catboost_straight(grower, bins, rounds: int) -> float:
    ours = ("save_snapshot", "snapshot_file", "snapshot_interval")
    params = {key: value for key, value in grower.params.items() if key not in ours}
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        catboost.CatBoost({**params, "iterations": rounds, "train_dir": folder}).fit(bins[0], eval_set=bins[1])
        return time.process_time() - began


class Killed(BaseException):
    """Not an Exception: nothing on the way may catch it."""


def resumed(name: str, rows: int, columns: int, rounds: int = 60, at: int = 3) -> None:
    """Killed after block `at`, gone on in a new process's place; hashes of model and probabilities."""
    x, y, w = market(rows, columns)
    cut = rows * 5 // 6

    def kill(block, metrics):
        if block == at:
            raise Killed

    def hash_of(manager, *callbacks) -> tuple[str, int | None]:
        model = build_model(name, rounds=rounds, patience=0, threads=1)
        kept = manager and manager.phase(name)
        held = (x[cut:], y[cut:], w[cut:])
        result = model.fit(x[:cut], y[:cut], w[:cut], validation=held, checkpoints=kept, callbacks=callbacks)
        reported = serialize_state(model.get_state()) + model.predict_proba(x).tobytes()
        return hashlib.sha256(reported).hexdigest()[:16], result.resumed_from

    whole, _ = hash_of(None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with CheckpointManager(folder, auto_save_minutes=0) as manager:
                hash_of(manager, kill)
        except Killed:
            pass
        with CheckpointManager(folder, auto_save_minutes=0) as manager:
            again, since = hash_of(manager)
    print_json(
        benchmark="boosters.resumed", model=name, whole=whole, resumed=again, from_block=since, equal=whole == again
    )


def prediction(rows: int, columns: int, rounds: int = 100, depth: int = 5) -> None:
    """Compare our compiled walk with `lightgbm.Booster.predict`, each on one thread."""
    x, y, w = market(rows, columns)
    model = build_model("lightgbm", rounds=rounds, patience=0, depth=depth, threads=1)
    model.fit(x, y, w)
    own = model._own_booster()
    model.predict_proba(x[:100])  # compiles
    sides = {"ours": lambda: model.predict_proba(x), "lightgbm": lambda: own.predict(x, num_threads=1)}
    runs = in_turns(sides, 5)
    ours, theirs = best(runs["ours"]).cpu, best(runs["lightgbm"]).cpu
    apart = np.abs(model.predict_proba(x) - own.predict(x)).max()
    print_json(
        benchmark="boosters.prediction", rows=rows, columns=columns, trees=3 * rounds, depth=depth,
        rows_per_s=round(rows / ours), lightgbm_rows_per_s=round(rows / theirs), times=digits(theirs / ours, 3),
        largest_difference=float(apart), wanted="at least 2",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--models", nargs="+", default=["xgboost", "lightgbm", "catboost"])
    args = parser.parse_args()
    for name in args.models:
        blockwise(name, args.rows, args.columns, args.rounds)
        resumed(name, args.rows // 10, args.columns)
    for depth in (5, 8):
        prediction(args.rows, args.columns, depth=depth)


if __name__ == "__main__":
    main()
