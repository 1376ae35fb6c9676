"""Findings of a finished model reach its result, its report and the JSON next to it."""

import html
import json
import shutil

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.metrics import row_log_loss
from ml_factory.storage.json_values import parse_json
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import evaluation
from ml_factory.workflows.prepared_dataset import load_dataset

SETTINGS = {"rounds": 150, "min_leaf": 1.0}


@pytest.fixture(scope="module")
def trained(prepared_template, tmp_path_factory):
    place = tmp_path_factory.mktemp("found") / "workspace"
    shutil.copytree(prepared_template, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ML_FACTORY_WANDB", "off")
        result = pipeline.train(place, "DEMO", 5, "xgboost", uncertified=True, model_settings=SETTINGS)
        compared = pipeline.evaluate(place, "DEMO", 5)
    return Workspace(place), result, compared


def test_findings_of_run_are_in_result_summary_page_and_json(trained):
    _, result, compared = trained
    assert "few_rows" in {one.code for one in result.findings}, "a week of bars"
    assert compared.findings == result.findings
    page = html.unescape(result.report_path.read_text())
    shown = page.replace("−", "-").replace("<code>", "`").replace("</code>", "`")
    facts = parse_json(result.report_path.with_suffix(".json").read_text())
    assert f"<h1>{result.verdict.answer}</h1>".replace("-0", "−0") in page and facts["answer"] == result.verdict.answer
    assert facts["next_step"] in page and "20 bars of" not in page and "5 bars of 5 minutes" in page
    assert all(f"<code>{name}</code>: " in page for name in BASELINES)
    assert "Not checked: one month" in page and "None of the checks" not in page
    assert [one for one in facts["findings"] if one["code"] != "dies_of_costs"] == [
        one.to_dict() for one in result.findings
    ]
    for number, one in enumerate(facts["findings"], 1):
        line = f"{number}. {one['severity'].capitalize()}: {one['sentence']} {one['advice']}"
        assert line.strip() in shown
    for number, one in enumerate(result.findings, 1):
        assert f"finding {number}, {one.severity}: {one.sentence}" in result.summary()
    own = facts["backtest"]["strategies"][0]
    assert "After costs" in page and f"<dt>after costs</dt><dd>{own['net']:+,.0f}<small>" in shown
    assert facts["backtest"]["run_id"] == result.run_id and "Validation rows, by least edge" in page
    verdict = facts["verdicts"]["xgboost"]
    assert verdict["sentence"] == result.verdict.sentence and f"{verdict['gain_best']:+.4f}" in shown
    assert f"{verdict['gain_best']:+.4f} ({verdict['gain_best_low']:+.4f}" in shown
    assert f"{result.verdict.numbers[1:]}." in shown
    assert f"Evaluated on all {result.verdict.rows:,}" in page or "test rows, those with a full input window" in page
    assert "xgboost was chosen on validation rows" not in page and "Information coefficient of xgboost" in page
    assert "synthetic market with a planted edge" in page and "QUICK limited" not in page
    shares = [f"{one:.4f}" for name in ("predicted", "observed") for one in result.calibration[name]]
    assert len(shares) == 6 and all(share in page for share in shares)
    losses = {row["name"]: row["log_loss"] for row in facts["metrics"]}
    assert losses == pytest.approx(result.metrics.query("split == 'test'").set_index("name")["log_loss"].to_dict())
    assert all(f"{loss:.4f}" in page for loss in losses.values())
    assert json.loads(json.dumps(result.to_dict()))["findings"] == [one.to_dict() for one in result.findings]


def test_find_model_issues_reads_gains_of_each_part_over_prior_of_training_rows(trained, monkeypatch):
    workspace, result, _ = trained
    seen = {}
    monkeypatch.setattr(evaluation, "overfit_finding", lambda train, valid: seen.update(train=train, valid=valid))
    monkeypatch.setattr(evaluation, "concentration_finding", lambda unit, gains: seen.update({unit: gains}))
    pipeline.train(workspace, "DEMO", 5, "xgboost", uncertified=True, model_settings={"rounds": 150, "min_leaf": 1.0})
    data, stored = load_dataset(workspace, "DEMO", 5), pipeline.load_predictions(workspace, "DEMO", 5, "xgboost")
    rows = {part: data.labels.index.get_indexer(stored.index[stored["split"] == part]) for part in ("train", "test")}
    p = stored.loc[stored["split"] == "train", ["p_short", "p_neutral", "p_long"]].to_numpy()
    clear = data.unambiguous_mask[rows["train"]]
    y = data.y[rows["train"]][clear]
    shares = np.array([(y == label).mean() for label in (-1, 0, 1)])
    by_hand = -np.log(shares[y + 1]).mean() - row_log_loss(y, p[clear]).mean()
    assert seen["train"] == pytest.approx(by_hand) and seen["train"] > seen["valid"]
    test, gains = data.unambiguous_mask[rows["test"]], seen["month"]
    assert list(gains.index) == sorted(set(data.labels.index[rows["test"]].strftime("%Y-%m")))
    assert gains.sum() / test.sum() == pytest.approx(result.verdict.gain_best)
