"""Settings of a slice: variables of the guides, hostile values, accelerator types, the script of a worker."""

import shlex
import subprocess

import pytest

from ml_factory.errors import SettingsError
from ml_factory.tpu.accelerators import parse_accelerator
from ml_factory.tpu.settings import SliceSettings, parse_flat_yaml, read_settings
from ml_factory.tpu.worker_files import worker_script


@pytest.mark.parametrize(
    ("kind", "chips", "workers", "runtime"),
    [
        ("v2-8", 4, 1, "tpu-ubuntu2204-base"),
        ("v3-32", 16, 4, "tpu-ubuntu2204-base"),
        ("v4-32", 16, 4, "tpu-ubuntu2204-base"),
        ("v5p-8", 4, 1, "v2-alpha-tpuv5"),
        ("v5litepod-16", 16, 4, "v2-alpha-tpuv5-lite"),
        ("v6e-1", 1, 1, "v2-alpha-tpuv6e"),
        ("v6e-8", 8, 1, "v2-alpha-tpuv6e"),
        ("v6e-256", 256, 64, "v2-alpha-tpuv6e"),
    ],
)
def test_parse_accelerator_gives_chips_workers_and_runtime(kind, chips, workers, runtime):
    found = parse_accelerator(kind)
    assert (found.kind, found.chips, found.workers, found.runtime) == (kind, chips, workers, runtime)


def test_accelerator_price_is_of_user_only():
    assert "price unknown" in parse_accelerator("v4-32").describe(None)
    assert "48.00 an hour at 3 a chip" in parse_accelerator("v4-32").describe(3.0)
    assert parse_accelerator("v5e-8").kind == "v5litepod-8"


@pytest.mark.parametrize("kind", ["v4-3", "v1-8", "v6e-3", "v6e-512", "v4-0", "v4", "v4-32; rm", "V4-32"])
def test_parse_accelerator_of_unknown_type_raises(kind):
    with pytest.raises(SettingsError, match=r"Unknown accelerator|no slice of this size"):
        parse_accelerator(kind)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TPU_NAME", "--force"),
        ("TPU_NAME", "a; rm -rf /"),
        ("TPU_NAME", "a$(id)"),
        ("BUCKET", "gs://x"),
        ("BUCKET", "../x"),
        ("PROJECT_ID", "p --impersonate"),
        ("ZONE", "us-central2-b --async"),
        ("NETWORK", "x\ty"),
        ("SPOT", "maybe"),
        ("ALLOW_SSH_FROM", "everywhere"),
        ("SERVICE_ACCOUNT", "a b@c"),
        ("RUNTIME_VERSION", "`id`"),
        ("REQUESTS", "0"),
        ("WANDB_SECRET", "a/b"),
        ("EXTRAS", "train]"),
        ("TORCH_VERSION", "2.9 --index-url http://x"),
        ("COMMAND", "'open"),
    ],
)
def test_read_settings_with_hostile_value_refuses_in_one_line(play, name, value):
    one = play({}, **{name: f'"{value}"'})
    with pytest.raises(SettingsError) as caught:
        one.open()
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "A: [1, 2]",
        "TPU_NAME: {a: b}",
        "- x",
        "TPU_NAME: &a b",
        "TPU_NAME: !!python/object x",
        "TPU_NAME: |",
        "text",
        "TPU_NAMES: x",
        "TPU_NAME: a\nTPU_NAME: b",
        "XRT_TPU_CONFIG: x",
    ],
)
def test_parse_flat_yaml_refuses_what_is_no_flat_setting(line):
    with pytest.raises(SettingsError, match="line"):
        parse_flat_yaml(line, "tpu.yaml")


def test_parse_flat_yaml_reads_quotes_comments_and_old_spelling():
    text = "# slice\n---\ntpu_name: 'a-b'  # name\nZONE: \"us-central2-b\"\nSPOT: True\nXLA_USEBF16: 1\nNETWORK:\n"
    assert parse_flat_yaml(text, "x") == {
        "TPU_NAME": "a-b",
        "ZONE": "us-central2-b",
        "SPOT": "true",
        "XLA_USE_BF16": "1",
        "NETWORK": "",
    }


def test_read_settings_takes_environment_and_file_wins(play, monkeypatch):
    one = play({}, TPU_NAME="from-file")
    monkeypatch.setenv("TPU_NAME", "from-environment")
    monkeypatch.setenv("XLA_USEBF16", "1")
    settings = read_settings(one.config)
    assert (settings["TPU_NAME"], settings["XLA_USE_BF16"], settings.request) == ("from-file", "1", "from-file-qr")
    with pytest.raises(SettingsError, match="no PROJECT_ID, ZONE"):
        read_settings(None)


@pytest.mark.parametrize(
    "command", ["python3 -m torch_xla.distributed.xla_dist --tpu=x", "ctpu up --name x", "conda activate torch-xla-1.6"]
)
def test_read_settings_with_retired_command_names_what_replaced_it(play, command):
    with pytest.raises(SettingsError, match=r"is gone: .*tpu setup"):
        play({}, COMMAND=command).open()


def test_worker_script_quotes_every_word_of_command(play):
    words = ["python", "a b", "$(touch x)", "it's", ";", "@", "`id`"]
    settings = play({}).open().settings
    script = worker_script(SliceSettings({**settings.values, "COMMAND": shlex.join(words)}))
    assert f"\n  {shlex.join(words)} || code=$?\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60).returncode == 0
