"""recipe t5: generation, scores; trained, killed, resumed to the same bits, evaluated, written."""

import runpy
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contract.doors import TrainSpec, made_up_texts, t5
from tests.recipes.text_cases import t5_settings, trained_t5

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT.parent / "shared" / "data" / "text"


@pytest.fixture(scope="module")
def network():
    """A small network of random weights."""
    made = t5.new_t5(t5.t5_config("builtin:tiny", 6), 0).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        if weight.ndim > 1:
            weight.normal_(0, 0.25, generator=generator)
    return made


def test_score_of_a_label_is_the_log_probability_of_its_tokens(network):
    tokens = torch.randint(2, 6, (7, 9), generator=torch.Generator().manual_seed(0))
    tokens[2, 4:] = 0
    labels = torch.tensor([[3, 1, 0], [4, 2, 1], [5, 1, 0]])
    scores = network.score_labels(tokens, labels)
    for place, label in enumerate(labels):
        likely = torch.log_softmax(network(tokens, label.expand(7, -1)), -1).gather(2, label.expand(7, -1)[..., None])
        assert torch.allclose(scores[:, place], (likely[..., 0] * (label != 0)).sum(1), atol=1e-5)


def test_tokenizer_is_a_function_of_the_texts_and_ends_with_its_end():
    made, again = (t5.train_tokenizer(made_up_texts(300, 0)["Text"], 150, 64) for _ in "ab")
    assert again.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    ids = made("the ship near the harbour")["input_ids"]
    assert ids[-1] == 1 and made.decode(ids, skip_special_tokens=True) == "the ship near the harbour"
    assert len(made) <= 150 and made.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
    assert 2 in made("Ω")["input_ids"]


def test_padding_changes_no_loss(network):
    tokens, labels = torch.tensor([[3, 4, 5, 1]]), torch.tensor([[4, 1]])
    short = t5.label_loss(network, (tokens, labels, torch.ones(1)))
    padded = (torch.nn.functional.pad(tokens, (0, 12)), torch.nn.functional.pad(labels, (0, 3)), torch.ones(1))
    assert float(t5.label_loss(network, padded)[0]) == pytest.approx(float(short[0]), rel=1e-5)
    assert float(t5.label_loss(network, (tokens, labels, torch.zeros(1)))[0]) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    return trained_t5(tmp_path_factory.mktemp("whole"), t5_settings())


def test_killed_in_mid_epoch_and_resumed_equals_uninterrupted_to_the_bit(whole, tmp_path, monkeypatch):
    loss, calls = t5.label_loss, count(1)

    def dying(*given):
        if next(calls) in (4, 13):  # in the first epoch, and in the second
            raise KeyboardInterrupt
        return loss(*given)

    monkeypatch.setattr(t5, "label_loss", dying)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trained_t5(tmp_path, t5_settings())
    resumed = trained_t5(tmp_path, t5_settings())
    assert resumed["resumed_step"] and resumed["exact"] and not resumed["inexact"]
    ours, theirs = ((Path(one["folder"]) / "model" / "model.safetensors").read_bytes() for one in (resumed, whole))
    assert ours == theirs and resumed["interval"] == whole["interval"]


def test_run_learns_and_writes_predictions_results_and_pictures(whole):
    folder = Path(whole["folder"])
    assert whole["accuracy"] > 0.9 > whole["baselines"]["majority"]
    rows = [line.split("\t") for line in (folder / "predictions.tsv").read_text().splitlines()]
    assert rows[0][:3] == ["Id", "Label", "Predicted"] and len(rows) == 1 + whole["rows"]
    assert sum(row[1] == row[2] for row in rows[1:]) == round(whole["accuracy"] * (len(rows) - 1))
    table = {line.split("\t")[0]: line.split("\t") for line in (folder / "results.tsv").read_text().splitlines()}
    assert float(table["t5"][2]) == pytest.approx(whole["accuracy"], abs=1e-6)
    assert {"majority", "length", "bag of words"} <= set(table)
    for name in ("overview.png", "results.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "NOT clearly better than bag of words" in t5.summary(whole)


def test_trained_model_by_path_is_the_start_of_another_training(whole, tmp_path):
    given = t5_settings(lr=1e-9, epochs=1)
    again = trained_t5(tmp_path, given | {"model": str(Path(whole["folder"]) / "model")})
    assert again["accuracy"] == whole["accuracy"] and again["length"] == whole["length"]


def test_model_whose_tokenizer_is_pure_python_is_trained(tmp_path):
    for part in (t5.transformers.ByT5Tokenizer(), t5.new_t5(t5.t5_config("builtin:tiny", 384), 0).model):
        part.save_pretrained(tmp_path / "byt5")
    given = t5_settings(40, epochs=1) | {"model": str(tmp_path / "byt5")}
    assert trained_t5(tmp_path, given)["pieces"] == 384


def write_lines(path: Path) -> Path:
    """Lines of tinyshakespeare and of WikiText-2, in their order."""
    sources = {"shakespeare": ["tinyshakespeare"], "wikipedia": ["wikitext2_valid", "wikitext2_test"]}
    rows = [(" ".join(line.split()), label) for label, names in sources.items() for name in names
            for line in (TEXT / f"{name}.txt").read_text(encoding="utf-8").splitlines() if line.strip()]  # fmt: skip
    path.write_text("Id\tText\tLabel\n" + "".join(f"{at}\t{text}\t{label}\n" for at, (text, label) in enumerate(rows)))
    return path


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(not TEXT.is_dir(), reason="the texts are not at hand")
def test_real_lines_reach_95_percent_in_three_minutes(tmp_path):
    loop = TrainSpec(epochs=1, batch=64, lr=2e-3, eval_batch=256, device="cpu", precision="fp32")
    settings = {"training": loop, "data": str(write_lines(tmp_path / "lines.tsv")), "max_length": 64}
    facts = trained_t5(tmp_path, settings)
    assert facts["accuracy"] >= 0.95 and facts["unseen"]["accuracy"] >= 0.95
    assert sum(one["seconds"] for one in facts["history"]) < 180
    assert np.isclose(facts["baselines"]["majority"], 0.86, atol=0.01)  # a tenth of each, in blocks


def test_guides_command_names_the_file_it_wants_and_trains_with_one(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = ROOT / "recipes" / "run_train_test.py"

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    for words in ((), ("--data", "tweets.tsv", "--fake_data")):
        code, _, err = call("--workspace", tmp_path, *words)
        assert code == 2 and "--data FILE.tsv" in err and "--fake_data" in err
    seen = []
    monkeypatch.setattr(t5, "run_t5", lambda place, training, **more: seen.append((training, more)) or {})
    assert call("--data", "tweets.tsv", "--model", "t5-base", "--batch_size", "8", "--accumulate=4")[0] == 0
    ((training, given),) = seen
    assert (given["data"], given["model"], training.accumulate) == ("tweets.tsv", "t5-base", 4)
