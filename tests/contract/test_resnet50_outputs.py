"""Where recipe resnet50 reads and writes: buckets, weights of a finished run, logs of several hosts."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ml_factory.errors import FactoryError, UnresponsiveMountError
from ml_factory.recipes.shards import find_shards, index_shard
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.recipes.image_cases import settings_of, weights_of


def quiet(line: str) -> None:
    """Print nothing."""


@pytest.fixture
def machine(gcs_bucket, monkeypatch, tmp_path):
    """Call it with a name to sit at that machine: its disk is its own, the bucket is the same."""

    def sit_at(name: str) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return gcs_bucket

    return sit_at


def objects(address: str, folder: Path) -> list[str]:
    """Names of the objects below an address, read again."""
    doors.Mirror(address, folder).pull()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_shards_weights_logs_and_run_of_resnet50_are_in_the_bucket(machine, shards, tmp_path):
    bucket = machine("one")
    for part, folder in zip(("train", "test"), shards, strict=True):
        (folder / "note.txt").write_text("no shard")
        for more in sorted(folder.glob("s-*"))[2:]:  # the other test has all of them
            more.unlink()
        doors.Mirror(f"{bucket}/{part}", folder).push()
    for source, message in ((f"{bucket}/none", "No shards here"), (f"{bucket}/test/missing.tar", r"missing\.tar")):
        with pytest.raises(FactoryError, match=message):
            find_shards(source)
    sources = f"{bucket}/train", f"{bucket}/test/s-{{000000..000000}}.tar"
    outputs = {"model_bucket": bucket, "logdir": f"{bucket}/logs"}
    place, once = Workspace(f"{bucket}/slice"), {"epochs": 1}
    written = str(tmp_path / "out" / "model-chkpt.pt")
    facts = doors.train_resnet50(place, **settings_of(sources, once, save_model=written, **outputs), emit=quiet)
    assert facts["uploaded"] == f"{bucket}/model-chkpt.pt" and facts["log"] == f"{bucket}/logs"
    found = objects(bucket, tmp_path / "seen")
    run = f"slice/results/resnet50/{facts['run']}"
    assert {"model-chkpt.pt", "logs/worker-0.log", f"{run}/result.json", f"{run}/weights.state"} <= set(found)
    assert sum(name.startswith("logs/events.out.tfevents.") for name in found) == 1
    assert sum(name.startswith("train/s-") for name in found) == 2  # nothing else was deleted
    log = (tmp_path / "seen" / "logs" / "worker-0.log").read_text()

    first = weights_of(place)
    machine("two")  # another machine: it finds the result, and begins another run with these weights
    again = Workspace(f"{bucket}/slice")
    assert doors.train_resnet50(again, **settings_of(sources, once), emit=quiet)["run"] == facts["run"]
    given = settings_of(sources, once, initial=f"{bucket}/model-chkpt.pt", **outputs)
    assert doors.train_resnet50(again, **given, emit=quiet)["run"] != facts["run"]
    objects(bucket, tmp_path / "seen")
    kept = doors.read_state_file(tmp_path / "seen" / "model-chkpt.pt")["weights"]
    assert all(torch.equal(value, first[name]) for name, value in kept.items())
    text = (tmp_path / "seen" / "logs" / "worker-0.log").read_text()
    assert text.startswith(log) and len(text) > len(log)  # continued, not overwritten


def test_shards_of_a_bucket_are_read_through_few_copies_and_equal_local_ones(machine, shards, monkeypatch, tmp_path):
    bucket = machine("one")
    doors.Mirror(f"{bucket}/train", shards[0]).push()
    monkeypatch.setattr(doors.shards_file, "MOST_FETCHED", 2)
    there, here = (doors.ShardSamples(find_shards(str(source)), 16, 3, 0) for source in (f"{bucket}/train", shards[0]))
    assert there.fingerprint == here.fingerprint and len(there) == 36
    numbers = here.order(0).tolist()
    with ThreadPoolExecutor(4) as pool:
        for (one, label), (other, wanted) in zip(pool.map(there.read, numbers), map(here.read, numbers), strict=True):
            assert np.array_equal(one, other) and label == wanted
    assert 0 < len(list((tmp_path / "one" / "ml_factory" / "shards").glob("*.tar"))) <= 2
    silent = replace(find_shards(f"{bucket}/train")[0], remote=Mock(get=Mock(side_effect=UnresponsiveMountError("no"))))
    silent.copy.unlink(missing_ok=True)
    for read in (lambda: index_shard(silent), lambda: doors.ShardSamples([silent], 16, 3, 0).read(0)):
        with pytest.raises(UnresponsiveMountError):
            read()


def test_each_host_of_a_slice_logs_to_its_own_file_and_the_first_writes_events(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_PROCESS_COUNT", "2")
    for host in "01":
        monkeypatch.setenv("TPU_PROCESS_ID", host)
        log = doors.WorkerLog(tmp_path / host, doors.Device("cpu", 1), samples=8, batch=4, every=1, emit=quiet)
        log.log_steps(1, 1, 0.5)
        names = sorted(path.name.split(".")[0] for path in (tmp_path / host).iterdir())
        assert names == (["events", "worker-0"] if host == "0" else ["worker-1"])
        assert f"[{host}] | Training" in log.path.read_text()


def test_worker_log_counts_steps_of_full_shares(tmp_path):
    device = doors.Device("cpu", 1, chips=4)
    log = doors.WorkerLog(tmp_path, device, samples=64, batch=10, every=1, emit=quiet)
    log.end_training()
    assert "Replica Train Samples=16," in log.path.read_text()  # 8 steps of 8 samples, on 4 chips


def test_ranks_agree_on_the_run_of_rank_zero(tmp_path):
    place, sent = Workspace(tmp_path), []

    class Joined(doors.ProcessGroup):
        def broadcast(self, state):
            sent.append(state)
            return sent[0]

    first, _ = doors.agree_on_run(place, "t5", {"a": 1}, Joined(0, 2), fresh=True)
    first.folder.mkdir(parents=True)  # rank 0 was quicker
    second, done = doors.agree_on_run(place, "t5", {"a": 1}, Joined(1, 2), fresh=True)
    assert second == first and done is None
