"""Order of samples in shards: each once an epoch, with any numbers of ranks; broken shards are named."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_factory.errors import FactoryError
from ml_factory.recipes.shards import ShardPlan, index_shard
from tests.contract.doors import array_samples, find_shards, write_shards

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=40)


def shards_of(sizes: list[int]) -> dict[str, list[str]]:
    """Shards of these sizes; keys repeat from shard to shard."""
    return {f"shard-{number:03d}.tar": [f"{key:04d}" for key in range(size)] for number, size in enumerate(sizes)}


def all_keys(shards: dict[str, list[str]]) -> Counter:
    return Counter(f"{name}/{key}" for name, keys in shards.items() for key in keys)


@given(SIZES, st.integers(0, 5), st.integers(0, 5), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_plan_gives_every_sample_to_one_rank_once_an_epoch(sizes, seed, epoch, world):
    shards = shards_of(sizes)
    ranks = [list(ShardPlan(shards, seed, epoch, world).keys(rank, 0)) for rank in range(world)]
    assert Counter(key for keys in ranks for key in keys) == all_keys(shards)
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@given(SIZES, st.integers(0, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_plan_resumed_twenty_times_with_other_ranks_equals_one_pass_over_the_epoch(sizes, seed, data):
    shards, start, seen = shards_of(sizes), 0, []
    whole = list(ShardPlan(shards, seed, 1, 1).keys(0))
    for _ in range(20):
        world = data.draw(st.sampled_from([8, 1, 3]))
        steps = data.draw(st.integers(0, 4))
        ranks = [list(ShardPlan(shards, seed, 1, world).keys(rank, start)) for rank in range(world)]
        steps = min(steps, min(map(len, ranks)))
        seen += [keys[step] for step in range(steps) for keys in ranks]
        start += steps * world
    seen += ShardPlan(shards, seed, 1, 1).keys(0, start)
    assert seen == whole and Counter(seen) == all_keys(shards)


def test_plan_of_each_epoch_and_seed_is_another_order_and_mixes_shards():
    shards = shards_of([50] * 40)
    orders = [list(ShardPlan(shards, *pair, 1).keys(0)) for pair in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert orders[0] == orders[3] and orders[0] != orders[1] != orders[2] != orders[0]
    assert len({key.partition("/")[0] for key in orders[0][:100]}) > 8


def test_plan_of_files_gives_keys_and_refuses_ranks_outside(images):
    folder, count = images
    paths = sorted(folder.glob("*.tar"))
    assert len(set(ShardPlan(paths, 0, 0, 1).keys(0))) == count
    for arguments in ((3, 0), (0, 10**6), (-1, 0)):
        with pytest.raises(FactoryError):
            list(ShardPlan(paths, 0, 0, 3).keys(*arguments))


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=generator.integers(0, 256, (25, 8, 8, 3), np.uint8), y=np.arange(25) % 5)
    write_shards(array_samples(tmp_path / "a.npz", ""), tmp_path / "in", 10, "s", 0)
    return tmp_path / "in", 25


def test_index_of_shard_cut_off_anywhere_is_refused_and_never_shorter(images):
    folder, _ = images
    path = folder / "s-000000.tar"
    data, whole = path.read_bytes(), len(index_shard(path))
    last = max(offset + size for parts in index_shard(path).values() for offset, size in parts.values())
    for length in (0, 100, 512, 1024, 1536, last // 2 // 512 * 512, last - 1, last, -(-last // 512) * 512):
        path.write_bytes(data[:length])
        with pytest.raises(FactoryError, match=r"This shard (is broken|has no sample).*s-000000\.tar"):
            index_shard(path)
    header = data.index(b"ustar", 600)
    path.write_bytes(data[: header - 100] + b"x" + data[header - 99 :])  # one letter of a later header
    with pytest.raises(FactoryError, match="broken"):
        index_shard(path)
    path.write_bytes(data)
    assert len(index_shard(path)) == whole


def test_sources_expand_braces_and_folders_and_name_a_missing_shard(images):
    folder, _ = images
    wanted = sorted(folder.glob("*.tar"))
    assert find_shards(str(folder)) == wanted == find_shards(f"{folder}/s-{{000000..000002}}.tar")
    assert find_shards(f"{wanted[1]}::{wanted[0]}") == [wanted[1], wanted[0]]
    with pytest.raises(FactoryError, match=r"s-000003\.tar"):
        find_shards(f"{folder}/s-{{000000..000003}}.tar")


def test_pipe_source_is_the_address_that_gsutil_would_print_and_no_other_command_runs(images):
    folder, _ = images
    wanted = sorted(folder.glob("*.tar"))[:2]
    assert find_shards(f"pipe:gsutil cat {folder}/s-{{000000..000001}}.tar") == wanted
    with pytest.raises(FactoryError, match="Shards cannot be read from there"):
        find_shards(f"pipe:cat {folder}/s-000000.tar")
