"""Settings of recipe sdce: the guide's flags and YAML keys, which of them wins, and what is refused."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from cyclopts import CycloptsError

from ml_factory.errors import FactoryError, SettingsError
from tests.contract.doors import (
    SdceSettings,
    batch_arithmetic,
    cli,
    is_writing_process,
    root_of_output,
    sdce_run,
    sdce_settings,
    tpu_host,
)

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def given(monkeypatch):
    """Call it with the words of a command: the settings that the recipe would train with."""
    seen = []
    monkeypatch.chdir(RECIPES)

    def run(config, *, fresh, on_status, **flags) -> dict:
        seen.append(sdce_settings(config, flags))
        return {}

    monkeypatch.setattr(sdce_run, "run_sdce", run)

    def settings_of(words: list[str]) -> SdceSettings:
        cli.run(["recipe", "sdce", *words])
        return seen[-1]

    return settings_of


def test_sdce_settings_defaults_are_those_of_the_guide():
    settings = SdceSettings()
    assert (settings.surrogate_k, settings.probability_threshold) == (30, 0.02)
    assert (settings.surrogate_loss_weight_initial, settings.surrogate_loss_weight_final) == (1.0, 0.0)
    assert (settings.max_seq_length, settings.loss_type, settings.device) == (1024, "surrogate", "auto")
    assert (settings.batch_size, settings.gradient_accumulation_steps) == (4, 4)
    assert settings.output_dir == "./outputs" and settings.learning_rate == 1e-4


def test_sdce_flags_win_over_yaml_and_yaml_over_defaults(given):
    settings = given(["--config", "config.yaml", "--num_epochs", "7", "--surrogate-k", "5", "--device", "cpu"])
    assert settings.num_epochs == 7 and settings.surrogate_k == 5 and settings.device == "cpu"
    assert settings.learning_rate == 1e-4  # YAML reads 1e-4 as a text
    assert settings.dataset_config == "wikitext-2-raw-v1" and settings.gradient_checkpointing
    assert settings.precision == "bf16" and settings.wandb_project == "sdce-training"


def test_sdce_yaml_files_are_valid_and_hold_only_known_keys():
    for name in ("config.yaml", "config_tinyllama_tpuv4.yaml"):
        settings, table = sdce_settings(RECIPES / name), yaml.safe_load((RECIPES / name).read_text())
        found = {item.metadata["place"]: getattr(settings, item.name) for item in fields(settings)}
        for section, values in table.items():
            for key, value in values.items():
                assert found[f"{section}.{key}"] == (float(value) if key == "learning_rate" else value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trainin:\n  num_epochs: 3\n",
            r"no such setting.*got 'trainin.num_epochs'.*did you mean 'training.num_epochs'",
        ),
        ("training:\n  num_epoch: 3\n", r"no such setting.*did you mean 'training.num_epochs'"),
        ("training:\n  num_epochs: three\n", r"num_epochs.*got 'three', wanted"),
        ("training:\n  num_epochs: true\n", r"num_epochs.*got True"),
        ("training: 3\n", "cannot be read.*wanted YAML"),
        ("surrogate:\n  probability_threshold: 1.5\n", r"probability_threshold.*in \[0, 1\)"),
        ("training:\n  loss_type: sdce\n", r"loss_type.*surrogate, kl, standard"),
        ("- 1\n", "cannot be read.*wanted YAML"),
        ("a: [1\n", "cannot be read.*wanted YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "cannot be read"),
    ],
)
def test_sdce_yaml_with_mistake_names_place_and_nearest(text, message, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(SettingsError, match=message):
        sdce_settings(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device tpu --mixed_precision fp16", r"A TPU has no fp16.*bf16"),
        ("--config config_tinyllama_tpuv4.yaml --mixed_precision fp16", r"A TPU has no fp16.*bf16"),
        ("--standard_training --loss_type kl", "Two losses"), ("--base_modell x", "base_modell"),
    ],
)  # fmt: skip
def test_sdce_flags_that_cannot_be_are_refused_before_any_model_is_loaded(words, message, given):
    with pytest.raises((SettingsError, CycloptsError), match=message):
        given(words.split())


def test_sdce_batch_arithmetic_counts_chips_not_cores():
    settings = sdce_settings(RECIPES / "config_tinyllama_tpuv4.yaml")
    line = batch_arithmetic(settings, 16, on_tpu=True)
    assert "4 sequences a device x 16 devices x 8 accumulated = 512 sequences, 1,048,576 tokens a step" in line
    assert "names 32; this slice has 16 chips" in line
    assert "names" not in batch_arithmetic(settings, 32, on_tpu=True) + batch_arithmetic(settings, 1, on_tpu=False)


def test_sdce_first_host_alone_writes(monkeypatch):
    assert is_writing_process()
    monkeypatch.setenv("TPU_PROCESS_COUNT", "4")
    monkeypatch.setenv("TPU_PROCESS_ID", "3")
    assert tpu_host() == 3 and not is_writing_process()
    for wrong in ("4", "-1", "x"):
        monkeypatch.setenv("TPU_PROCESS_ID", wrong)
        with pytest.raises(FactoryError, match="TPU_PROCESS_ID"):
            tpu_host()


def test_sdce_identity_leaves_out_machine_and_without_surrogate_its_section():
    def changed(**values):
        return replace(SdceSettings(), **values).identity()

    assert changed(device="cpu", output_dir="x", log_steps=3) == SdceSettings().identity()
    assert changed(seed=3) != SdceSettings().identity() != changed(learning_rate=0.1)
    assert not any(place.startswith("surrogate.") for place in changed(loss_type="standard"))


def test_sdce_precision_of_environment_is_that_of_no_flag(given, monkeypatch):
    monkeypatch.setenv("XLA_USEBF16", "1")
    assert given([]).precision == "bf16"
    assert given(["--mixed_precision", "fp32"]).precision == "fp32"


def test_sdce_relative_output_of_a_worker_lies_in_its_bucket(monkeypatch):
    assert root_of_output("./outputs") == "./outputs"
    monkeypatch.setenv("ML_FACTORY_ROOT", "gs://bucket/my-tpu")
    assert root_of_output("./outputs") == "gs://bucket/my-tpu/outputs"
    assert root_of_output("gs://other/x") == "gs://other/x" and root_of_output("/tmp/x") == "/tmp/x"
    with pytest.raises(SettingsError, match="leads out of the bucket"):
        root_of_output("../x")


@pytest.mark.parametrize(
    ("hosts", "says"), [(1, "absent"), (2, r"Two numbers of hosts \[tpu_num_hosts\]\. got 2, wanted 4"), (4, "absent")]
)
def test_sdce_two_numbers_of_hosts_are_refused(hosts, says, monkeypatch):
    monkeypatch.setenv("TPU_PROCESS_COUNT", "4")
    with pytest.raises(FactoryError, match=says):
        sdce_run.run_sdce(dataset="./absent.txt", device="cpu", tpu_num_hosts=hosts)
