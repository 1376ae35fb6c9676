"""Bars to a Parquet file of columns, block after block: the matrix is never whole in memory.

While one thread makes the columns of a block, another writes the block before it or makes other columns. Each family's
engine goes through the blocks in order, so the numbers are those of `build_features`, bit for bit.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.cpu_count import cores
from ml_factory.data.plain_parquet import ColumnBlocks, ColumnWriter, sample_rows
from ml_factory.data.resample import Frame
from ml_factory.data.sessions import MarketSpec
from ml_factory.features import custom
from ml_factory.features.build import FeatureSpec, base_groups, column_names, joined_frames
from ml_factory.features.engine import CHUNK, Family, FrameFeatures
from ml_factory.progress import phase
from ml_factory.storage import atomic_files

BLOCK_ROWS = 4 * CHUNK
BLOCKS = 16  # a short file has as many, so that both threads have work to its end and its blocks take few fresh pages
BUFFERS = 3  # blocks in memory: one being written, and those in which columns are made
KNOWN_AT = "known_at"


@dataclass(frozen=True)
class ExportedFeatures:
    """What `export_features` wrote.

    names : the columns.  first : row i of the file is bar `first + i` of the base frame.  blocks : the file's numbers,
    mapped; a scaler may be fitted on them.  known_at : int64[N], UTC ns.
    cpu_s : kind of work -> seconds of processor time, over all threads.
    """

    names: list[str]
    first: int
    blocks: ColumnBlocks
    known_at: np.ndarray
    cpu_s: dict[str, float]

    def __len__(self) -> int:
        return len(self.known_at)


def export_features(
    bars: pd.DataFrame,
    market: MarketSpec,
    path: str | os.PathLike,
    spec: FeatureSpec | None = None,
    *,
    threads: int | None = None,
) -> ExportedFeatures:
    """Write the matrix that `build_features` makes of these arguments as a Parquet file, in one step: all or nothing.

    Memory beyond the bars does not grow with their number, save for the coarse frames' columns and each row's times.
    Raises BarsError as `build_features` does, WorkspaceError when the disk is full.
    """
    spec = spec or FeatureSpec()
    threads = threads or min(2, cores())
    began = time.process_time()
    made = joined_frames(bars, market, spec, threads)
    cpu_s = {"frames": time.process_time() - began}
    lanes = _lanes(made, market, spec)
    names = made.names
    rows = len(made.base) - made.first
    size = min(BLOCK_ROWS, max(rows // BLOCKS // CHUNK, 1) * CHUNK)
    sizes = [min(size, rows - begin) for begin in range(0, rows, size)]

    def fill(aside: os.PathLike) -> None:
        with phase("features", rows) as done, ColumnWriter(aside, names) as writer:
            belt = _Belt(lanes, writer, sizes, (step, sample), done)
            with ThreadPoolExecutor(threads) as pool:
                for worker in [pool.submit(belt.work) for _ in range(threads)]:
                    worker.result()
            cpu_s.update(belt.cpu_s)

    step = max(1, rows // sample_rows(rows))  # who fits a scaler reads the file once instead of twice
    sample = np.empty((len(names), -(-rows // step)), np.float32)
    atomic_files.replace_file(path, fill, 4 * rows * len(names), flush=False)
    blocks = ColumnBlocks(path, len(names), sizes, sample=(np.arange(0, rows, step), sample))
    return ExportedFeatures(names, made.first, blocks, made.base.known_at[made.first :], cpu_s)


@dataclass(frozen=True)
class _Lane:
    """One kind of work, block after block.  fill : (first row, out_FN) -> None, for the columns [begin, stop)."""

    kind: str
    begin: int
    stop: int
    fill: Callable[[int, np.ndarray], None]


def _lanes(made, market: MarketSpec, spec: FeatureSpec) -> list[_Lane]:
    """The coarse frames first: their columns are made whole before their first block."""
    lanes, place, base, first = [], 0, made.base, made.first
    for group in _groups(market, spec):
        engine = FrameFeatures(market, group, coarse=False)
        lanes.append(_Lane("columns", place, place := place + len(engine.names), _own(engine, base, first)))
    coarse = []
    for minutes, frame in made.frames.items():
        engine = FrameFeatures(market, spec.families_of(market), coarse=not spec.full_frames)
        join = _joined(engine, frame, made.joins[minutes][first:])
        coarse.append(_Lane("joins", place, place := place + len(engine.names), join))
    for name in spec.custom:
        column = np.empty(len(base) - first, np.float32)
        custom.fill(name, base, first, column)  # the user's code runs in the user's thread
        coarse.append(_Lane("custom", place, place := place + 1, _copied(column)))
    return coarse + lanes


def _groups(market: MarketSpec, spec: FeatureSpec) -> list[dict[str, Family]]:
    """The base frame's families in one group, whose engine makes the series they share once, where to write the file
    is as much work; else in two."""
    groups, own = base_groups(market, spec), spec.families_of(market)
    columns = sum(len(family.names(market, False)) for family in own.values())
    if len(column_names(market, spec)) < 1.5 * columns:
        return groups
    return [own]


def _own(engine: FrameFeatures, base: Frame, first: int) -> Callable[[int, np.ndarray], None]:
    """The base frame's own columns; before the first block come the bars of the warm-up."""

    def fill(row: int, out_FN: np.ndarray) -> None:
        begin, stop = first + row if row else 0, first + row + out_FN.shape[1]
        engine.push(_part(base, begin, stop), out_FN.T, first + row - begin)

    return fill


def _joined(engine: FrameFeatures, frame: Frame, rows: np.ndarray) -> Callable[[int, np.ndarray], None]:
    """The coarse frame's columns as each base row saw them.  rows : int64[N], the coarse bar of each."""
    values_FM = np.empty((len(engine.names), len(frame)), np.float32)

    def fill(row: int, out_FN: np.ndarray) -> None:
        if row == 0:
            engine.push(frame, values_FM.T)
        _take(values_FM, rows[row : row + out_FN.shape[1]], out_FN)

    return fill


def _copied(column: np.ndarray) -> Callable[[int, np.ndarray], None]:
    def fill(row: int, out_FN: np.ndarray) -> None:
        out_FN[0] = column[row : row + out_FN.shape[1]]

    return fill


def _part(frame: Frame, begin: int, stop: int) -> Frame:
    columns = {field.name: getattr(frame, field.name) for field in fields(frame)}
    cut = {name: values[begin:stop] for name, values in columns.items() if isinstance(values, np.ndarray)}
    return replace(frame, **cut)


@njit(cache=True, nogil=True, error_model="numpy")
def _take(values_FM, rows, out_FN):
    """out[f, i] = values[f, rows[i]]: each coarse bar stands in as many rows as saw it last."""
    begins, bars = np.empty(len(rows) + 1, np.int64), 0
    for i in range(len(rows)):
        if i == 0 or rows[i] != rows[i - 1]:
            begins[bars] = i
            bars += 1
    begins[bars] = len(rows)
    for f in range(len(out_FN)):
        values, out = values_FM[f], out_FN[f]
        for k in range(bars):
            value = values[rows[begins[k]]]
            for i in range(begins[k], begins[k + 1]):
                out[np.uint64(i)] = value


class _Belt:
    """Blocks of columns on their way to the file.

    Every lane goes through the blocks in order, at most BUFFERS ahead of the file. A thread takes what is due first:
    writing the next whole block, else the lane that is furthest behind.
    """

    def __init__(self, lanes: list[_Lane], writer: ColumnWriter, sizes: list[int], sample: tuple, done: Callable):
        """sample : (every how many rows, values [F, S] to fill)."""
        self.lanes, self.writer, self.sizes, self.sample, self.done = lanes, writer, sizes, sample, done
        self.cpu_s: dict[str, float] = {}
        features = len(sample[1])
        self._buffers = [np.empty((features, max(sizes)), np.float32) for _ in range(min(BUFFERS, len(sizes)))]
        self._next = [0] * len(lanes)  # block of each lane
        self._busy = [False] * len(lanes)
        self._written, self._writing, self._failed = 0, False, False
        self._turn = threading.Condition()

    def work(self) -> None:
        """Until all is written, or another thread failed."""
        try:
            while (job := self._take_job()) is not None:
                began = time.thread_time()
                kind = self._write() if job < 0 else self._fill(job)
                with self._turn:
                    self.cpu_s[kind] = self.cpu_s.get(kind, 0.0) + time.thread_time() - began
        except BaseException:
            with self._turn:
                self._failed = True
                self._turn.notify_all()
            raise

    def _take_job(self) -> int | None:
        """A lane, -1 to write the next block, None when there is nothing more to do."""
        with self._turn:
            while not self._failed and self._written < len(self.sizes):
                if not self._writing and min(self._next) > self._written:
                    self._writing = True
                    return -1
                last = min(self._written + len(self._buffers), len(self.sizes))
                due = [lane for lane, block in enumerate(self._next) if block < last and not self._busy[lane]]
                if due:
                    lane = min(due, key=lambda lane: self._next[lane])
                    self._busy[lane] = True
                    return lane
                self._turn.wait()
            return None

    def _fill(self, number: int) -> str:
        lane, block = self.lanes[number], self._next[number]
        out = self._buffers[block % len(self._buffers)][lane.begin : lane.stop, : self.sizes[block]]
        lane.fill(block * self.sizes[0], out)
        self._keep(block * self.sizes[0], lane, out)
        with self._turn:
            self._next[number], self._busy[number] = block + 1, False
            self._turn.notify_all()
        return lane.kind

    def _keep(self, row: int, lane: _Lane, columns: np.ndarray) -> None:
        """The sampled rows of these columns, which begin at `row`, while they are in the processor's cache."""
        step, sample = self.sample
        first = -(-row // step)
        some = columns[:, first * step - row :: step]
        sample[lane.begin : lane.stop, first : first + some.shape[1]] = some

    def _write(self) -> str:
        block = self._written
        columns = self._buffers[block % len(self._buffers)][:, : self.sizes[block]]
        self.writer.write(columns)
        with self._turn:
            self._written, self._writing = block + 1, False
            self._turn.notify_all()
        self.done(self.sizes[block])
        return "file"
