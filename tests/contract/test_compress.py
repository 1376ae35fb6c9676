"""recipe compress: what each method removes, files that predict what was reported, the table, resume."""

import json
from pathlib import Path

import pytest
import torch

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import compression_summary, prune_t5_state, run_compress, t5
from tests.recipes.text_cases import t5_settings, trained_t5


def test_t5_without_heads_that_do_nothing_computes_the_same():
    config = t5.t5_config("builtin:tiny", 30)
    network = t5.new_t5(config, 0).eval()
    state = {name: value.clone() for name, value in network.model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("Attention.o.weight"):
            value[:, 16:48] = 0  # heads 1 and 2
        if name.endswith("wo.weight"):
            value[:, ::2] = 0
    network.model.load_state_dict(state)
    sizes, kept = prune_t5_state(network.model, 0.5)
    assert sizes == {"num_heads": 2, "d_ff": 64}
    smaller = t5.new_t5(type(config)(**{**config.to_dict(), **sizes}), 1).eval()
    smaller.model.load_state_dict(kept)
    tokens, labels = torch.randint(2, 30, (3, 7)), torch.randint(2, 30, (3, 4))
    with torch.no_grad():
        assert torch.allclose(network(tokens, labels), smaller(tokens, labels), atol=1e-5)


@pytest.mark.parametrize(
    "text", ["int9", "magnitude:1.5", "int8_dynamic:0.5", "structured:0.5+int8_weights", "magnitude:x"]
)
def test_wrong_method_is_refused(text, tmp_path):
    with pytest.raises(SettingsError, match="methods"):
        run_compress(Workspace(tmp_path), "", methods=text)


def test_model_without_a_run_is_refused(tmp_path, call):
    code, _, err = call("recipe", "compress", "--model", tmp_path, "--workspace", tmp_path / "w")
    assert code == 2 and "no finished run" in err and "recipe t5" in err
    (tmp_path / "result.json").write_text('{"recipe": "resnet50"}')
    code, _, err = call("recipe", "compress", "--model", tmp_path, "--workspace", tmp_path / "w")
    assert code == 2 and "resnet50" in err and "wanted" in err


def table_of(facts: dict) -> dict[str, dict]:
    return {row["method"]: row for row in facts["rows"]}


def test_t5_table_has_size_latency_quality_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    run = trained_t5(tmp_path, t5_settings())["folder"]
    settings = {"model": run, "rounds": 2, "device": "cpu", "threads": 1}
    facts = run_compress(Workspace(tmp_path), **settings, on_status=str)
    rows, lines = table_of(facts), (Path(facts["folder"]) / "table.tsv").read_text().splitlines()
    assert len(lines) == 6 and any(row["pareto"] for row in rows.values())
    assert rows["structured:0.5"]["parameters"] < rows["original"]["parameters"]
    assert 3 * rows["int8_weights"]["bytes"] < rows["original"]["bytes"]
    assert rows["int8_weights"]["bytes"] < rows["structured:0.5"]["bytes"] < rows["original"]["bytes"]
    assert "sparse without speed" in rows["magnitude:0.5"]["note"] and rows["magnitude:0.5"]["zeros"] > 0.2
    assert rows["original"]["low"] < rows["original"]["quality"] and rows["original"]["difference"] == 0
    assert (Path(facts["folder"]) / "table.png").read_bytes().startswith(b"\x89PNG")
    assert compression_summary(facts).count("\n") == 7 and "* on the Pareto front" in compression_summary(facts)
    stored = {row["file"]: Path(row["file"]).stat().st_mtime_ns for row in rows.values()}
    again = run_compress(Workspace(tmp_path), **settings | {"rounds": 3}, on_status=str)
    assert {file: Path(file).stat().st_mtime_ns for file in stored} == stored  # all were finished
    assert [row["quality"] for row in again["rows"]] == [row["quality"] for row in facts["rows"]]
    assert again["folder"] != facts["folder"]
    variant = Path(rows["int8_dynamic"]["file"]).parent / "result.json"
    variant.write_text(json.dumps(json.loads(variant.read_text()) | {"quality": 0.1}))
    with pytest.raises(FactoryError, match="predicts otherwise than was reported"):
        run_compress(Workspace(tmp_path), **settings, methods="int8_dynamic", on_status=str)


@pytest.mark.parametrize("content", ["[1]", '{"recipe": "t5"}'])
def test_result_of_another_form_is_refused_as_damaged(content, tmp_path):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(SettingsError, match=r"This result is damaged.*result\.json"):
        run_compress(Workspace(tmp_path), str(tmp_path), on_status=str)
