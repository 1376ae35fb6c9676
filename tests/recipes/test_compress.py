"""recipe compress: what each method removes, files that predict what was reported, the table, resume."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ml_factory import pipeline
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.recipes import compress_run, t5
from ml_factory.recipes.compress_run import CompressionSettings, parse_method, run_compress
from ml_factory.recipes.compression.pruning import prune_by_magnitude, prune_t5_state
from ml_factory.recipes.compression.variant_file import Variant, load_variant, save_variant
from ml_factory.storage.workspace import Workspace
from tests.recipes.test_t5 import settings_of, trained


def test_magnitude_pruning_sets_the_smallest_to_zero_and_training_keeps_them_zero():
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LSTM(16, 4))
    whole = torch.cat([one.detach().abs().flatten() for one in network.parameters() if one.ndim > 1])
    masks = prune_by_magnitude(network, 0.5)
    kept = torch.cat([mask.flatten() for mask in masks.values()]).bool()
    assert len(masks) == 3 and int(kept.sum()) == len(whole) // 2 and whole[kept].min() >= whole[~kept].max()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    for _ in range(3):
        network(torch.randn(5, 8))[0].square().sum().backward()
        optimizer.step()
    for name, mask in masks.items():
        value = network.get_parameter(name)
        assert not value[mask == 0].any() and value[mask == 1].abs().min() > 0


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
    smaller = t5.new_t5(type(config)(**{**config.to_dict(), "num_heads": 2, "d_ff": 64}), 1).eval()
    smaller.model.load_state_dict(prune_t5_state(state, 4, 16, 2, 64))
    tokens, labels = torch.randint(2, 30, (3, 7)), torch.randint(2, 30, (3, 4))
    with torch.no_grad():
        assert torch.allclose(network(tokens, labels), smaller(tokens, labels), atol=1e-5)


@pytest.mark.parametrize(
    "text", ["int9", "magnitude:1.5", "int8_dynamic:0.5", "structured:0.5+int8_weights", "distill:x"]
)
def test_wrong_method_is_refused(text):
    with pytest.raises(SettingsError):
        parse_method(text)


@pytest.mark.parametrize("int8", ["int8_dynamic", "int8_weights"])
def test_int8_file_is_smaller_and_loads_to_the_same_outputs(int8, tmp_path):
    def build(architecture):
        return nn.Sequential(nn.Conv2d(3, 32, 3, bias=False), nn.Flatten(), nn.Linear(1152, int(architecture["out"])))

    network, x = build({"out": 64}).eval(), torch.randn(4, 3, 8, 8)
    whole, size = network(x).detach(), sum(one.numel() for one in network.parameters()) * 4
    assert save_variant(tmp_path / "a.state", "a", Variant("m", network, {"out": 64}, int8)) < 0.4 * size
    first, second = (load_variant(tmp_path / "a.state", "a", build).network for _ in "ab")
    with torch.no_grad():
        assert torch.equal(first(x), second(x)) and 0 < (first(x) - whole).abs().max() < 0.1
    with pytest.raises(SettingsError, match="no compressed network of this model"):
        load_variant(tmp_path / "a.state", "b", build)
    with pytest.raises(FactoryError, match="damaged"):
        load_variant(tmp_path / "a.state", "a", lambda architecture: build({"out": 65}))


def table_of(facts: dict) -> dict[str, dict]:
    return {row["method"]: row for row in facts["rows"]}


def test_t5_table_has_size_latency_quality_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    run = trained(tmp_path, settings_of())["folder"]
    methods = "magnitude:0.5,structured:0.5,int8_dynamic,int8_weights,distill:0.5"
    settings = CompressionSettings(model=run, methods=methods, distill_epochs=1, rounds=2, device="cpu", threads=1)
    calls, real = [], compress_run.run_training_loop
    monkeypatch.setattr(compress_run, "run_training_loop", lambda *a, **k: calls.append(1) or real(*a, **k))
    facts = run_compress(Workspace(tmp_path), settings, on_status=str)
    rows, lines = table_of(facts), (Path(facts["folder"]) / "table.tsv").read_text().splitlines()
    assert len(lines) == 7 and len(calls) == 3 and any(row["pareto"] for row in rows.values())
    assert rows["structured:0.5"]["parameters"] < rows["original"]["parameters"] > rows["distill:0.5"]["parameters"]
    assert rows["int8_weights"]["bytes"] < rows["structured:0.5"]["bytes"] < rows["original"]["bytes"]
    assert "sparse without speed" in rows["magnitude:0.5"]["note"] and rows["magnitude:0.5"]["zeros"] > 0.2
    assert rows["original"]["low"] < rows["original"]["quality"] and rows["original"]["difference"] == 0
    assert (Path(facts["folder"]) / "table.png").read_bytes().startswith(b"\x89PNG")
    again = run_compress(Workspace(tmp_path), settings, on_status=str)
    assert len(calls) == 3  # all were finished
    assert [row["quality"] for row in again["rows"]] == [row["quality"] for row in facts["rows"]]
    variant = Path(rows["int8_dynamic"]["file"]).parent / "result.json"
    variant.write_text(json.dumps(json.loads(variant.read_text()) | {"quality": 0.1}))
    with pytest.raises(FactoryError, match="predicts otherwise than was reported"):
        run_compress(Workspace(tmp_path), replace(settings, methods="int8_dynamic"), on_status=str)


@pytest.mark.parametrize("model", ["patchtst", "lstm"])
def test_network_of_a_market_is_compressed_on_its_own_data(model, prepared):
    pipeline.train(prepared, "DEMO", 5, model, quick=True, mirror="off")
    settings = CompressionSettings(model=model, symbol="DEMO", horizon=5, methods="structured:0.5,int8_dynamic",
                                   rounds=1, device="cpu", threads=1)  # fmt: skip
    rows = table_of(run_compress(prepared, settings, on_status=str))
    assert rows["structured:0.5"]["parameters"] < rows["original"]["parameters"]
    assert all(np.isfinite(row["quality"]) for row in rows.values())


def test_model_without_a_run_is_refused(tmp_path, call):
    code, _, err = call("recipe", "compress", "--model", tmp_path, "--workspace", tmp_path / "w")
    assert code == 2 and "no finished run" in err and "recipe t5" in err
    (tmp_path / "result.json").write_text('{"recipe": "resnet50"}')
    code, _, err = call("recipe", "compress", "--model", tmp_path, "--workspace", tmp_path / "w")
    assert code == 2 and "resnet50" in err and "wanted" in err
