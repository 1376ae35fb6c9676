"""recipe compress: what each method removes, files that predict what was reported, the table, resume."""

import json
from pathlib import Path

import pytest

from ml_factory.errors import FactoryError, SettingsError
from ml_factory.recipes import run as recipe_run
from ml_factory.recipes.compress import run_compress, summary
from ml_factory.storage.workspace import Workspace
from tests.recipes.text_cases import t5_settings, trained_t5


def table_of(facts: dict) -> dict[str, dict]:
    return {row["method"]: row for row in facts["rows"]}


def test_t5_table_has_size_latency_quality_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    run = trained_t5(tmp_path, t5_settings())["folder"]
    settings = {"model": run, "rounds": 2, "device": "cpu", "threads": 1}
    calls, real = [], recipe_run.run_training_loop
    monkeypatch.setattr(recipe_run, "run_training_loop", lambda *a, **k: calls.append(1) or real(*a, **k))
    facts = run_compress(Workspace(tmp_path), **settings, on_status=str)
    rows, lines = table_of(facts), (Path(facts["folder"]) / "table.tsv").read_text().splitlines()
    assert len(lines) == 6 and len(calls) == 2 and any(row["pareto"] for row in rows.values())
    assert rows["structured:0.5"]["parameters"] < rows["original"]["parameters"]
    assert 3 * rows["int8_weights"]["bytes"] < rows["original"]["bytes"]
    assert rows["int8_weights"]["bytes"] < rows["structured:0.5"]["bytes"] < rows["original"]["bytes"]
    assert "sparse without speed" in rows["magnitude:0.5"]["note"] and rows["magnitude:0.5"]["zeros"] > 0.2
    assert rows["original"]["low"] < rows["original"]["quality"] and rows["original"]["difference"] == 0
    assert (Path(facts["folder"]) / "table.png").read_bytes().startswith(b"\x89PNG")
    assert summary(facts).count("\n") == 7 and "* on the Pareto front" in summary(facts)
    again = run_compress(Workspace(tmp_path), **settings, on_status=str)
    assert len(calls) == 2  # all were finished
    assert [row["quality"] for row in again["rows"]] == [row["quality"] for row in facts["rows"]]
    variant = Path(rows["int8_dynamic"]["file"]).parent / "result.json"
    variant.write_text(json.dumps(json.loads(variant.read_text()) | {"quality": 0.1}))
    with pytest.raises(FactoryError, match="predicts otherwise than was reported"):
        run_compress(Workspace(tmp_path), **settings, methods="int8_dynamic", on_status=str)


@pytest.mark.parametrize("content", ["[1]", '{"recipe": "t5"}'])
def test_result_of_another_form_is_refused_as_damaged(content, tmp_path):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(SettingsError, match=r"This result is damaged.*result\.json"):
        run_compress(Workspace(tmp_path), str(tmp_path), on_status=str)
