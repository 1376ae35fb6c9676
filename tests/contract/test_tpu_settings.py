"""Settings of a slice: variables of the guides, hostile values, accelerator types, the script of a worker."""

import shlex
import subprocess

import pytest

from ml_factory.errors import SettingsError
from tests.contract.doors import SliceSettings, read_settings, worker_script


@pytest.mark.parametrize(
    ("kind", "chips", "workers", "runtime"),
    [
        ("v2-8", 4, 1, "tpu-ubuntu2204-base"), ("v3-32", 16, 4, "tpu-ubuntu2204-base"),
        ("v4-32", 16, 4, "tpu-ubuntu2204-base"), ("v5p-8", 4, 1, "v2-alpha-tpuv5"),
        ("v5e-16", 16, 4, "v2-alpha-tpuv5-lite"), ("v6e-1", 1, 1, "v2-alpha-tpuv6e"),
        ("v6e-8", 8, 1, "v2-alpha-tpuv6e"), ("v6e-256", 256, 64, "v2-alpha-tpuv6e"),
    ],
)  # fmt: skip
def test_accelerator_type_gives_chips_workers_and_runtime(play, kind, chips, workers, runtime):
    found = play({}, ACCELERATOR_TYPE=kind).open().settings
    assert (found.chips, found.workers, found["RUNTIME_VERSION"]) == (chips, workers, runtime)


def test_unknown_accelerator_type_is_refused(play):
    with pytest.raises(SettingsError, match="Unknown accelerator"):
        play({}, ACCELERATOR_TYPE="v1-8").open()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TPU_NAME", "--force"), ("TPU_NAME", "a; rm -rf /"), ("TPU_NAME", "a$(id)"), ("BUCKET", "gs://x"),
        ("BUCKET", "../x"), ("PROJECT_ID", "p --impersonate"), ("ZONE", "us-central2-b --async"), ("NETWORK", "x\ty"),
        ("SPOT", "maybe"), ("SERVICE_ACCOUNT", "a b@c"), ("RUNTIME_VERSION", "`id`"), ("REQUESTS", "0"),
        ("WANDB_SECRET", "a/b"), ("EXTRAS", "train]"), ("TORCH_VERSION", "2.9 --index-url http://x"),
        ("COMMAND", "'open"),
    ],
)  # fmt: skip
def test_read_settings_with_hostile_value_refuses_in_one_line(play, name, value):
    one = play({}, **{name: f'"{value}"'})
    with pytest.raises(SettingsError) as caught:
        one.open()
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [
    "A: [1, 2]", "TPU_NAME: {a: b}", "- x", "text", "TPU_NAMES: x", "XRT_TPU_CONFIG: x", "TPU_NAME: [",
])  # fmt: skip
def test_read_settings_refuses_what_is_no_flat_setting(line, tmp_path):
    (tmp_path / "tpu.yaml").write_text(line)
    with pytest.raises(SettingsError, match=r"tpu\.yaml"):
        read_settings(tmp_path / "tpu.yaml")


def test_read_settings_takes_quotes_comments_numbers_as_they_are_written_and_old_spelling(play):
    one = play({})
    more = "# slice\nSPOT: True\nXLA_USEBF16: 1\nNETWORK:\nTORCH_VERSION: 2.10  # no number\nsubnetwork: 'a-b'\n"
    one.config.write_text(one.config.read_text() + "\n" + more)
    found = read_settings(one.config)
    names = ("SPOT", "XLA_USE_BF16", "NETWORK", "TORCH_VERSION", "SUBNETWORK")
    assert [found[name] for name in names] == ["true", "1", "", "2.10", "a-b"]


def test_read_settings_takes_environment_and_file_wins(play, monkeypatch):
    one = play({}, TPU_NAME="from-file")
    monkeypatch.setenv("TPU_NAME", "from-environment")
    monkeypatch.setenv("XLA_USEBF16", "1")
    settings = read_settings(one.config)
    assert (settings["TPU_NAME"], settings["XLA_USE_BF16"]) == ("from-file", "1")
    with pytest.raises(SettingsError, match="no PROJECT_ID, ZONE"):
        read_settings(None)


def test_worker_script_quotes_every_word_of_command(play):
    words = ["python", "a b", "$(touch x)", "it's", ";", "@", "`id`"]
    settings = play({}).open().settings
    script = worker_script(SliceSettings({**settings.values, "COMMAND": shlex.join(words)}))
    assert f"\n  {shlex.join(words)} || code=$?\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60).returncode == 0
