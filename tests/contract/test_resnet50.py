"""Recipe resnet50: torchvision's network, its log over kills, broken samples, events, flags."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ml_factory.errors import FactoryError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.recipes.image_cases import settings_of, weights_of

# The lines of the guide, with a CPU's device.
STEP_LINE = re.compile(
    r"\d+\.\d+\.\d+\.\d+ \[0\] \| Training Device=cpu/0 Epoch=\d+ Step=\d+ Loss=\d+\.\d{5} Rate=\d+\.\d\d "
    r"GlobalRate=\d+\.\d\d Time=\d\d:\d\d:\d\d"
)
END_LINES = (
    r"\[0\] Epoch 2 train end \d\d:\d\d:\d\d, Epoch Time=\d:\d\d:\d\d, Replica Train Samples=32, "
    r"Reduced GlobalRate=\d+\.\d\d",
    r"\[0\] Total Train Time: \d:\d\d:\d\d",
    r"\[0\] Max Accuracy: \d+\.\d\d%",
    r"\[0\] Avg\. Global Rate: \d+\.\d\d examples per second",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_network_is_torchvisions_with_the_standard_stem_and_narrow_ones_keep_its_names():
    from torchvision.models import resnet50

    theirs, ours = resnet50(num_classes=7), doors.build_resnet50(7, stem="standard")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    narrow = doors.build_resnet50(7, 4)
    assert list(narrow.state_dict()) == list(theirs.state_dict())
    assert narrow.conv1.weight.shape == (64, 3, 3, 3) and narrow.layer1[0].conv2.weight.shape == (4, 4, 3, 3)


def test_training_killed_in_an_epoch_goes_on_there_and_weights_are_written_where_they_are_requested_later(
    shards, tmp_path, monkeypatch
):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    place, straight, lines = Workspace(tmp_path / "cut"), Workspace(tmp_path / "straight"), []

    def emit(line: str) -> None:
        if "Epoch=2 Step=3 " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doors.train_resnet50(place, **settings_of(shards), emit=emit)
    result = doors.train_resnet50(place, **settings_of(shards), emit=lines.append)
    # No test image takes part in the training: with others it ends in the same way.
    other = doors.train_resnet50(straight, **settings_of((shards[0], shards[0])), emit=lambda line: None)
    assert [one["val_loss"] for one in other["history"]] == [one["val_loss"] for one in result["history"]]
    assert other["loss"] != result["loss"] and other["best_epoch"] == result["best_epoch"]
    assert 0 < sum("Training Device" in line for line in lines) < 4
    assert f"Max Accuracy: {result['accuracy']:.2%}" in "\n".join(lines) and len(result["history"]) == 2
    assert result["train_seconds"] == pytest.approx(sum(one["seconds"] for one in result["history"]))
    target = tmp_path / "later" / "model.pt"
    again = doors.train_resnet50(place, **settings_of(shards, save_model=str(target)), emit=lines.append)
    assert again["run"] == result["run"] and "finished before" in lines[-1] and again["saved"] == str(target)
    kept = weights_of(place)
    for other in (doors.read_state_file(target)["weights"], weights_of(straight)):
        assert other.keys() == kept.keys() and all(torch.equal(value, kept[name]) for name, value in other.items())


def test_log_of_made_up_images_has_the_lines_of_the_guide_in_file_and_output_and_events(shards, tmp_path):
    lines, fake = [], {"fake": True, "train_size": 36, "test_size": 9}
    given = settings_of(
        shards, **fake, logdir=str(tmp_path / "logs"), save_model=str(tmp_path / "w" / "model-chkpt.pt")
    )
    facts = doors.train_resnet50(Workspace(tmp_path / "w"), **given, emit=lines.append)
    assert len([line for line in lines if STEP_LINE.fullmatch(line)]) == 8
    for pattern in END_LINES:
        assert len([line for line in lines if re.fullmatch(pattern, line)]) == 1, pattern
    assert (tmp_path / "logs" / "worker-0.log").read_text().splitlines() == lines[1:]
    (events,) = (tmp_path / "logs").glob("events.out.tfevents.*")
    found = list(scalars_of(events))
    assert [step for step, tag, _ in found if tag == "train/loss"] == list(range(1, 9))
    assert [round(value, 4) for _, tag, value in found if tag == "validation/accuracy"] == [
        round(one["accuracy"], 4) for one in facts["history"]
    ]
    again = settings_of(shards, {"epochs": 1, "lr": 1e-9}, **fake, initial=facts["saved"])
    started = doors.train_resnet50(Workspace(tmp_path / "again"), **again, emit=lines.append)
    assert started["run"] != facts["run"]


def scalars_of(path: Path):
    """(step, tag, value) of every scalar in a file of events, read with the format's own messages."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = path.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        yield from ((event.step, one.tag, one.simple_value) for one in event.summary.value)
        at += length + 16


def test_broken_shard_or_sample_is_refused_by_its_name(shards, tmp_path):
    path = shards[0] / "s-000001.tar"
    data = bytearray(path.read_bytes())
    at = data.index(b"\x89PNG", 2000)
    data[at : at + 8] = bytes(8)
    (shards[0] / "s-000003.tar").write_bytes(b"cut off")
    path.write_bytes(data)
    with pytest.raises(FactoryError, match=r"This shard is broken.*s-000003\.tar"):
        doors.train_resnet50(Workspace(tmp_path / "a"), **settings_of(shards), emit=str)
    (shards[0] / "s-000003.tar").unlink()
    with pytest.raises(FactoryError, match=r"This sample is broken \[s-000001\.tar: \d{8}\]"):
        doors.train_resnet50(Workspace(tmp_path / "b"), **settings_of(shards), emit=str)
    with pytest.raises(FactoryError, match=r"This sample is broken.*class 2 of 2"):
        doors.train_resnet50(Workspace(tmp_path / "c"), **settings_of((shards[1], shards[1]), classes=2), emit=str)


def test_batches_are_a_function_of_their_positions_announced_or_not(shards):
    samples = doors.ShardSamples(sorted(shards[0].glob("*.tar")), 16, 3, 0)
    feed = doors.ImageBatches(samples, doors.Device("cpu", 1), training=True, workers=2)
    try:
        images, labels = feed(np.arange(36))
        assert sorted(labels.tolist()) == sorted(np.arange(36) % 3)
        feed.prefetch(np.arange(36))
        assert all(torch.equal(one, other) for one, other in zip((images, labels), feed(np.arange(36)), strict=True))
        assert not torch.equal(images, feed(np.arange(36, 72))[0])
    finally:
        feed.close()


def test_weights_of_another_network_or_a_pickle_are_refused_in_one_line(shards, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"\x80\x02}q\x00.")
    given = settings_of(shards, initial=str(tmp_path / "model.pt"))
    for other in ({}, {"model": "sdce"}, {"weights": {"fc.weight": torch.ones(3, 2)}}):
        if other:
            doors.write_state_file(tmp_path / "model.pt", other)
        with pytest.raises(FactoryError, match=r"no weights of this network.*model\.pt"):
            doors.train_resnet50(Workspace(tmp_path / "w"), **given)


def test_guides_variables_are_defaults_and_absent_shards_are_named(call, monkeypatch, tmp_path):
    for name in ("WDS_TRAIN_DIR", "WDS_VAL_DIR", "BUCKET", "TRAIN_SHARDS", "VAL_SHARDS"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = call("recipe", "resnet50")
    assert code == 2 and "--wds_traindir" in err and "TRAIN_SHARDS" in err
    monkeypatch.setenv("WDS_TRAIN_DIR", f"pipe:gsutil cat {tmp_path}/train-{{000000..000001}}.tar")
    monkeypatch.setenv("WDS_VAL_DIR", "/none")
    code, _, err = call("recipe", "resnet50", "--device", "cpu")
    assert code == 1 and f"No such shard [{tmp_path}/train-000000.tar]" in err
