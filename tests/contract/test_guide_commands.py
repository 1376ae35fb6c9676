"""Every command of the five guides that calls this project or a retired tool: it works, or one message names what
replaced it. The guides are not part of the project; where they are at hand, the list here is compared with them.
"""

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from ml_factory.errors import SettingsError
from tests.contract.doors import VARIABLES, cli, read_settings, recipe_commands, resnet50, sdce_run

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT.parent / "shared" / "guides"
GPT2 = "--base_model gpt2 --surrogate_model Qwen/Qwen3-0.6B"
WIKITEXT = "--dataset wikitext --dataset_config wikitext-2-raw-v1"
WORKS = {
    f"python train.py {GPT2} {WIKITEXT} --batch_size 4 --learning_rate 1e-4 --num_epochs 3": "sdce",
    f"torchrun --nproc_per_node=4 train.py {GPT2} {WIKITEXT}": "sdce",
    f"python train.py --device tpu --tpu_cores 8 {GPT2} --mixed_precision bf16 {WIKITEXT}": "sdce",
    f"python train.py --device tpu --tpu_cores 8 --tpu_num_hosts 4 {GPT2} --mixed_precision bf16 {WIKITEXT}": "sdce",
    "python train.py --standard_training --base_model gpt2 --dataset wikitext": "sdce",
    "python train.py --config config.yaml": "sdce",
    "python train.py --config config.yaml --device tpu --tpu_cores 8 --tpu_num_hosts 4": "sdce",
    "python run_train_test.py":
        "tests/contract/test_t5.py::test_guides_command_names_the_file_it_wants_and_trains_with_one",
    "./setup_tpu_training.sh setup": "tpu",
    "./setup_tpu_training.sh cleanup": "tpu",
    "python scripts/export_training_data.py --output data/training_set.parquet":
        "tests/contract/test_export_data.py::test_script_of_the_guide_exports_only_table_of_database_url",
    'papermill 02_train_tabular.ipynb output.ipynb -p SYMBOL "MES" -p HORIZON 20 -p MODEL "xgboost"':
        "tests/contract/test_guides.py::test_guide_papermill_parameters_pass_notebook_check",
}  # fmt: skip
MORE_OF_SDCE = (
    "train.py --config config_tinyllama_tpuv4.yaml",
    "train.py --surrogate_k 30 --probability_threshold 0.02 --surrogate_loss_weight_initial 1.0 "
    "--surrogate_loss_weight_final 0.0",
    "train.py --mixed_precision bf16 --gradient_checkpointing --init_from_scratch --loss_type kl",
)
# Verbs of the guide's table, next to those of its code blocks.
VERBS = ("setup", "resume", "status", "monitor", "logs", "logs 1", "ssh", "ssh 1", "stop", "cleanup")
RESNET = """test_train_mp_wds_cifar.py --num_epochs=$NUM_EPOCHS --batch_size=$BATCH_SIZE --num_workers=$NUM_WORKERS
--log_steps=10 --test_set_batch_size=$TEST_BATCH_SIZE --wds_traindir="$WDS_TRAIN_DIR" --wds_testdir="$WDS_VAL_DIR"
--save_model=$SAVE_MODEL --model_bucket=$BUCKET --trainsize=$TRAIN_SIZE --testsize=$TEST_SIZE
--logdir=$LOGDIR"""
RETIRED = {
    "python3 -m torch_xla.distributed.xla_dist --tpu=$TPU_NAME --restart-tpuvm-pod-server --env XLA_USE_BF16=1 -- "
    f"python3 /usr/share/pytorch/torchxla_tpu/{' '.join(RESNET.split())} 2>&1 | tee -a /tmp/out-wds-1.log":
        "xla_dist is gone: `tpu setup`",
    "ctpu up --tpu-size=v3-8 --machine-type=n1-standard-8 --zone=us-central1-a --tf-version=2.3.1 --name cwang-tpu "
    "--project ${PROJECT_ID}": "ctpu is gone: `tpu setup`",
    "conda activate torch-xla-1.6": "conda activate torch-xla-1.6 is gone: `tpu setup`",
}  # fmt: skip
# First words of commands that are not ours: the shell's, the cloud's, package installers.
OTHERS = ("export", "pip", "gcloud", "gsutil", "cd", "git", "curl", "tar", "grep", "while", "exit", "sudo", "vi", "ssh",
          "systemctl", "passwd", "htop", "scp", "#!", "EOF'", "./google-cloud-sdk/install.sh",
          "./google-cloud-sdk/bin/gcloud", "./google-cloud-sdk/bin/gsutil", "torch", "torch_xla", "-f")  # fmt: skip
EXPORTS = {
    "BUCKET": "tpu-demo", "TRAIN_SHARDS": "train/cifar-train-{000000..000639}.tar",
    "VAL_SHARDS": "val/cifar-val-{000000..000049}.tar",
    "WDS_TRAIN_DIR": "pipe:gsutil cat gs://${BUCKET}/${TRAIN_SHARDS}",
    "WDS_VAL_DIR": "pipe:gsutil cat gs://${BUCKET}/${VAL_SHARDS}", "LOGDIR": "gs://${BUCKET}/log-20261124",
    "TPU_NAME": "my-1vm-tpu", "NUM_EPOCHS": "5", "BATCH_SIZE": "128", "TEST_BATCH_SIZE": "64", "NUM_WORKERS": "8",
    "TRAIN_SIZE": "1280000", "TEST_SIZE": "50000", "SAVE_MODEL": "/tmp/model-chkpt.pt", "LOAD_CHKPT_FILE": "",
    "LOAD_CHKPT_DIR": "",
}  # fmt: skip


def commands_of(text: str) -> set[str]:
    """The commands in the code blocks of a guide that are for a shell, each on one line."""
    found = set()
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        if language not in ("", "bash"):
            continue
        for line in re.sub(r"\\ *\n\s*", " ", block).splitlines():
            command = " ".join(re.sub(r"\s#\s.*", "", line).split())
            if command and not command.startswith(("#", '"', ")")) and command.split()[0] not in OTHERS:
                found.add(command)
    return found


@pytest.mark.skipif(not GUIDES.is_dir(), reason="the guides are not at hand")
def test_list_holds_every_command_of_the_guides():
    found = set().union(*(commands_of(path.read_text()) for path in sorted(GUIDES.glob("*.md"))))
    commands = {one for one in found if re.match(r"(\./|python|torchrun|papermill|ctpu|conda)", one)}
    assert commands == {*WORKS, *RETIRED}


@pytest.fixture
def clean(monkeypatch):
    for name in [*VARIABLES, *EXPORTS, "XLA_USEBF16"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("command", [*(one for one, kind in WORKS.items() if kind == "sdce"), *MORE_OF_SDCE])
def test_guides_command_of_sdce_reaches_the_training(command, clean):
    seen = []

    def run(config, *, fresh, on_status, **flags):
        seen.append(sdce_run.sdce_settings(config, flags))
        return {}

    clean.setattr(sdce_run, "run_sdce", run)
    clean.chdir(ROOT / "recipes")
    script, *words = shlex.split(command[command.index("train.py") :])
    clean.setattr(sys, "argv", [script, *words])
    clean.setattr(sys, "path", [*sys.path])
    with suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    cli.run(["recipe", "sdce", *(word.replace("_", "-") if word.startswith("--") else word for word in words)])
    settings, dashed = seen
    assert settings == dashed and settings.needs_surrogate is ("--standard_training" not in words)
    for name, value in zip(words, [*words[1:], "--"], strict=True):
        if hasattr(settings, name.removeprefix("--")) and not value.startswith("--"):
            found = getattr(settings, name.removeprefix("--"))
            assert str(found) == value or found == float(value)


@pytest.mark.parametrize("script", [
    "recipes/train.py", "recipes/run_train_test.py", "recipes/test_train_mp_wds_cifar.py",
    "scripts/export_training_data.py",
])  # fmt: skip
def test_guides_script_under_a_python_without_packages_says_what_to_install(script):
    done = subprocess.run([sys.executable, "-S", script, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Next: make setup" in done.stderr, done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_guides_verb_of_slices_prints_its_commands(verb, clean, call, tmp_path):
    for line in ("PROJECT_ID=your-gcp-project", "TPU_NAME=tinyllama-v4-32", "ZONE=us-central2-b",
                 "ACCELERATOR_TYPE=v4-32", "WANDB_API_KEY=your-wandb-key", "BUCKET=your-bucket"):  # fmt: skip
        clean.setenv(*line.split("="))
    clean.setenv("CODE_DIR", str(ROOT))
    code, out, _ = call("tpu", *verb.split(), "--dry-run", "--workspace", tmp_path)
    assert code == 0 and "gcloud compute tpus" in out and "your-wandb-key" not in out


def test_guides_script_of_slices_is_the_verb_tpu(clean, tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["sh", ROOT / "recipes" / "setup_tpu_training.sh", "status", "--dry-run"], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 2 and "no PROJECT_ID, TPU_NAME, ZONE, ACCELERATOR_TYPE, BUCKET" in done.stderr


@pytest.fixture
def resnets(clean):
    """The settings of each training that a command reaches."""
    seen = []
    facts = {"accuracy": 0, "held_out_samples": 0, "test_samples": 0, "best_epoch": 1, "history": [{"accuracy": 0.0}]}
    clean.setattr(
        resnet50, "train_resnet50", lambda _, training, *, emit, **more: seen.append((training, more)) or facts
    )
    return seen


def test_guides_checkpoint_to_load_is_of_the_bucket_and_put_in_the_local_place(resnets, clean, call, tmp_path):
    def initial(**exports) -> str:
        for name in ("BUCKET", "LOAD_CHKPT_FILE", "LOAD_CHKPT_DIR"):
            clean.setenv(name, exports.get(name, ""))
        assert call("recipe", "resnet50", "--fake-data")[0] == 0
        return resnets[-1][1]["initial"]

    assert initial() == "" and initial(LOAD_CHKPT_DIR="/tmp/m.pt") == "/tmp/m.pt"
    assert initial(BUCKET="tpu-demo", LOAD_CHKPT_FILE="a/m.pt") == "gs://tpu-demo/a/m.pt"
    (tmp_path / "fetched.pt").write_bytes(b"weights")
    clean.setattr(recipe_commands, "fetch_file", {"gs://tpu-demo/m.pt": tmp_path / "fetched.pt"}.__getitem__)
    for place, target in ((tmp_path / "m.pt",) * 2, (tmp_path / "m.pt",) * 2, (tmp_path, tmp_path / "fetched.pt")):
        found = initial(BUCKET="tpu-demo", LOAD_CHKPT_FILE="m.pt", LOAD_CHKPT_DIR=str(place))
        assert found == str(target) and target.read_bytes() == b"weights"
    clean.setenv("BUCKET", "")
    code, _, err = call("recipe", "resnet50", "--fake-data")
    assert code == 2 and "Which bucket holds this object?" in err


def test_result_of_resnet_is_printed_by_the_first_process_alone(resnets, clean, call):
    for rank, lines in (("0", 1), ("1", 0)):
        clean.setenv("TORCHELASTIC_RUN_ID", "one")
        clean.setenv("RANK", rank)
        assert call("recipe", "resnet50", "--fake-data")[1].count("accuracy") == lines


def test_guides_command_of_resnet_takes_flags_and_the_same_from_the_environment(resnets, clean):
    for name, value in EXPORTS.items():
        clean.setenv(name, os.path.expandvars(value))
    words = [os.path.expandvars(word) for word in shlex.split(RESNET)][1:]
    clean.setenv("XLA_USEBF16", "1")
    for given in (words, ["--log_steps=10"]):
        cli.run(["recipe", "resnet50", *given])
    flags, environment = resnets
    assert flags == environment
    training, given = flags
    assert given["train"] == "pipe:gsutil cat gs://tpu-demo/train/cifar-train-{000000..000639}.tar"
    assert (training.epochs, training.batch, training.eval_batch, training.precision) == (5, 128, 64, "bf16")
    assert (given["workers"], given["train_size"], given["test_size"]) == (8, 1_280_000, 50_000)
    assert (given["save_model"], given["model_bucket"]) == ("/tmp/model-chkpt.pt", "tpu-demo")
    assert given["logdir"] == "gs://tpu-demo/log-20261124"


@pytest.mark.parametrize(("command", "message"), RETIRED.items())
def test_guides_retired_command_names_what_replaced_it(command, message, clean):
    for name, value in (("PROJECT_ID", "my-project"), ("TPU_NAME", "my-tpu"), ("ZONE", "us-central2-b"),
                        ("ACCELERATOR_TYPE", "v4-32"), ("BUCKET", "my-bucket")):  # fmt: skip
        clean.setenv(name, value)
    clean.setenv("COMMAND", command)
    with pytest.raises(SettingsError, match=re.escape(message)):
        read_settings(None)
    text = (ROOT / "docs" / "tpu.md").read_text()
    assert any(word in text for word in command.split() if word in ("ctpu", "conda") or "xla_dist" in word)


def test_variable_of_xrt_is_named_as_retired(clean, call):
    clean.setenv("XRT_TPU_CONFIG", "tpu_worker;0;10.0.0.2:8470")
    code, _, err = call("recipe", "sdce", "--help")
    assert code == 0 and "XRT_TPU_CONFIG: XRT is gone" in err and "PJRT_DEVICE=TPU" in err


RUNS = {"resnet50": "train_resnet50", "sdce_run": "run_sdce", "t5": "run_t5", "compress": "run_compress"}


@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize("module", RUNS)
def test_recipe_shows_progress_before_the_first_line_of_its_log(module, words, clean, call):
    seen = []

    def run(*_, **__):
        seen.extend(thread.name for thread in threading.enumerate())
        raise SettingsError("Enough was seen")

    clean.setattr(f"ml_factory.recipes.{module}.{RUNS[module]}", run)
    fake = () if module in ("sdce_run", "compress") else ("--fake-data",)
    assert call("recipe", module.removesuffix("_run"), *fake, *words)[0] == 2 and "heartbeat" in seen


ADVISERS = {
    "shards": ("shards",), "resnet50": ("resnet50", "images", "shards"), "sdce": ("sdce_run", "language_models"),
    "t5": ("t5", "labelled_text"), "compress": ("compress",),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVISERS)
def test_messages_of_a_recipe_name_only_options_of_its_command(name):
    known = {one for argument in cli.app["recipe"][name].assemble_argument_collection() for one in argument.names}
    for module in ADVISERS[name]:
        text = (ROOT / "ml_factory" / "recipes" / f"{module}.py").read_text(encoding="utf-8")
        named = {one.replace("_", "-") for one in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", text)}
        assert named <= {one.replace("_", "-") for one in known}, module


def test_commands_with_tests_elsewhere_have_them():
    for place in [kind for kind in WORKS.values() if "::" in kind]:
        path, _, name = place.partition("::")
        assert name in {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
