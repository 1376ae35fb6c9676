"""A feed in any chunks, cut and restored anywhere, gives the rows of the whole file to the bit."""

import itertools

import numpy as np
import pandas as pd

from tests.contract.doors import FeatureSpec, FeatureStream, build_features, feature


def feed(stream, bars, sizes, *, restore=0, seed=0):
    """All rows of `bars` pushed in chunks of `sizes`; the stream is saved and restored at `restore` random places."""
    random = np.random.default_rng(seed)
    cuts = [0]
    while cuts[-1] < len(bars):
        cuts.append(min(cuts[-1] + int(random.choice(sizes)), len(bars)))
    again = set(random.choice(len(cuts) - 1, min(restore, len(cuts) - 1), replace=False).tolist())
    rows = []
    for number, (begin, stop) in enumerate(itertools.pairwise(cuts)):
        if number in again:
            state, stream = stream.get_state(), FeatureStream(stream.market, stream.spec, cold=stream.cold)
            stream.load_state(state)
        rows.append(stream.push(bars.iloc[begin:stop]))
    return rows, stream


def test_feature_stream_advance_past_bucket_end_emits_row(real_bars):
    bars, market = real_bars("SPY")
    spec = FeatureSpec(5, (15,))
    end = np.flatnonzero(bars.index.minute % 5 == 2)[6_000]  # the feed stops two minutes before a bucket's end
    stream = FeatureStream(market, spec)
    stream.push(bars.iloc[: end + 1])
    due = (bars.index[end] + pd.Timedelta(minutes=3)).value
    assert len(stream.advance(due - 1)) == 0
    row = stream.advance(due)
    assert row.known_at.tolist() == [due]
    later = build_features(bars.iloc[: end + 500], market, spec)
    silent = build_features(bars.iloc[: end + 1], market, spec)
    assert due not in silent.known_at
    assert due in later.known_at


def test_feature_stream_cold_start_waits_warmup_bars_and_is_within_1e_6(real_bars):
    bars, market = real_bars("XAUUSD")
    spec = FeatureSpec(5, (15, 60))
    full = build_features(bars, market, spec)
    spread = full.values.std(axis=0)
    late = bars.loc[bars.index >= pd.Timestamp(full.base.start[5_000], tz="UTC")]
    rows, _ = feed(FeatureStream(market, spec, cold=True), late, (5_000,))
    first = next(one for one in rows if len(one))
    place = int(np.searchsorted(full.known_at, first.known_at[0]))
    assert full.first + place - 5_000 == spec.warmup_bars
    values = np.concatenate([one.values for one in rows])
    # float32 itself is coarser than 1e-6 of some columns' deviation: allow its last bit.
    allowed = 1e-6 * spread + np.spacing(np.abs(full.values[place : place + len(values)]))
    assert (np.abs(values - full.values[place : place + len(values)]) <= allowed).all()


def test_feature_stream_with_custom_feature_equals_whole_file(real_bars):
    @feature(memory=20)
    def gap_to_mean(bars):
        close = pd.Series(bars.close)
        return (close / close.rolling(20).mean() - 1.0).fillna(0.0)

    bars, market = real_bars("SPY")
    bars = bars.iloc[:15_000]
    spec = FeatureSpec(5, (15,), custom=("gap_to_mean",))
    matrix = build_features(bars, market, spec)
    rows, stream = feed(FeatureStream(market, spec), bars, (1, 700, 3000), restore=10)
    assert stream.names[-1] == matrix.names[-1] == "gap_to_mean"
    values = np.concatenate([one.values for one in rows])
    np.testing.assert_allclose(values[:, -1], matrix.values[:, -1], rtol=0, atol=1e-6 * matrix.values[:, -1].std())
    np.testing.assert_array_equal(values[:, :-1], matrix.values[:, :-1])
