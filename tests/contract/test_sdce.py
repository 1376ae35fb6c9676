"""recipe sdce as a whole: trained, killed, resumed, evaluated; models of Hugging Face from a local cache."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests.contract.doors import SdceSettings, summary
from tests.recipes.text_cases import trained_sdce, weights, write_text

ROOT = Path(__file__).resolve().parents[2]


def test_recipe_sdce_with_cache_equals_online_to_the_bit(sdce_settings):
    once = {"num_epochs": 1}
    online = trained_sdce(sdce_settings("online", **once))
    cached = trained_sdce(sdce_settings("cached", surrogate_cache="float32", **once))
    assert online["loss"] == cached["loss"] and any("cached in" in line for line in cached["lines"])
    theirs = weights(cached)
    assert all(np.array_equal(value, theirs[name]) for name, value in weights(online).items())
    standard = trained_sdce(sdce_settings("standard", loss_type="standard", **once))
    assert standard["loss"] != online["loss"]


def test_recipe_sdce_reports_batch_vocabulary_and_baseline(sdce_settings):
    result = trained_sdce(sdce_settings(num_epochs=1, probability_threshold=1e-9))
    assert result["lines"][0].startswith(
        "batch: 8 sequences a device x 1 devices x 2 accumulated = 16 sequences, 1,024"
    )
    assert any(line.startswith("vocabulary: 257 of 257 tokens (100.0%)") for line in result["lines"])
    assert result["surrogate"]["text_share"] == 1.0 and 1 <= result["ngram_order"] <= 6
    for share, found in (
        (1.0, result),
        (0.0, trained_sdce(sdce_settings("none", probability_threshold=0.999, num_epochs=1))),
    ):
        assert found["surrogate"]["positions_with_token"] == share
        [line] = [one for one in found["lines"] if "positions have a token" in one]
        assert f"{share:.1%} of" in line and ("the loss is the standard one. Next:" in line) == (share == 0)
    assert result["better_than_ngram"] is (result["loss"] < result["ngram_loss"])
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    text = summary(result)
    assert ("NOT better than" in text) is not result["better_than_ngram"]
    record = json.loads((Path(result["model"]).parent / "run.json").read_text())
    assert record["settings"]["learning_rate"] == 3e-3


# ---------------------------------------------------------------------- models of Hugging Face


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders of two models of transformers: gpt of byte-level BPE, llama with word-start marks and fall-back bytes."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    place, kinds = (
        tmp_path_factory.mktemp("hub"),
        (tokenizers.pre_tokenizers.ByteLevel, tokenizers.pre_tokenizers.Metaspace),
    )
    corpus = [write_text(place / "corpus.txt").read_text()]
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    for name, kind, special, config in (
        ("gpt", kinds[0](add_prefix_space=False), ["<end>"], transformers.GPT2Config(
            vocab_size=350, n_positions=64, **small)),
        ("llama", kinds[1](), ["<unk>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))], transformers.LlamaConfig(
            vocab_size=408, intermediate_size=32, num_key_value_heads=1, max_position_embeddings=64, **small)),
    ):  # fmt: skip
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=name == "llama", unk_token="<unk>"))
        inner.pre_tokenizer = kind
        inner.train_from_iterator(corpus, tokenizers.trainers.BpeTrainer(
            vocab_size=350, special_tokens=special, show_progress=False,
            initial_alphabet=kinds[0].alphabet() if name == "gpt" else []))  # fmt: skip
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
        made.save_pretrained(str(place / name))
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(place / name))
    return {"base_model": str(place / "gpt"), "surrogate_model": str(place / "llama"), "surrogate_k": 6}


SHORT = {"num_epochs": 1, "learning_rate": 3e-3}


def test_recipe_sdce_trains_models_of_transformers_and_reads_what_it_wrote(sdce_settings, hub):
    result = trained_sdce(sdce_settings("hub", **hub, **SHORT))
    assert result["loss"] < result["loss_before"] and 0.5 < result["surrogate"]["vocabulary_share"] <= 1
    assert result["surrogate"]["text_share"] > 0.5
    again = trained_sdce(sdce_settings("reloaded", **hub | SHORT | {"base_model": result["model"]}))
    assert again["loss_before"] == pytest.approx(result["loss"], rel=1e-6)


def test_recipe_sdce_recomputes_blocks_and_starts_from_scratch(sdce_settings, hub):
    short = hub | SHORT | {"loss_type": "standard"}
    stored = trained_sdce(sdce_settings("a", **short))
    assert trained_sdce(sdce_settings("b", **short, gradient_checkpointing=True))["loss"] == pytest.approx(
        stored["loss"], abs=1e-5
    )
    scratch = sdce_settings("c", **short, init_from_scratch=True)
    first = trained_sdce(scratch)
    assert first["loss_before"] != stored["loss_before"]
    assert trained_sdce(scratch, fresh=True)["loss"] == first["loss"]


# ---------------------------------------------------------------------- several processes


def command(settings: SdceSettings, folder: Path) -> list[str]:
    """The command of these settings, from a YAML file, through the guide's own entry point."""
    path, sections = folder / "settings.yaml", {}
    for item in fields(settings):
        section, key = item.metadata["place"].split(".")
        sections.setdefault(section, {})[key] = getattr(settings, item.name)
    path.write_text(json.dumps(sections))
    return [str(ROOT / "recipes" / "train.py"), "--config", str(path), "--json"]


@pytest.mark.soak
@pytest.mark.slow
def test_recipe_sdce_two_processes_of_torchrun_give_losses_of_one(sdce_settings, tmp_path):
    alone = trained_sdce(sdce_settings("alone"))
    halved = sdce_settings("pair", batch_size=4)
    words = [
        sys.executable,
        *["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"],
        *command(halved, tmp_path),
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "ML_FACTORY_WANDB": "off"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["batch"] == alone["batch"] and result["loss"] == pytest.approx(alone["loss"], rel=1e-4)
