"""A bundle predicts raw bars as the pipeline does, and is refused where anything in it or around it does not fit."""

import json
import os
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle, pipeline
from ml_factory.errors import BarsError, CheckpointError, SettingsError
from tests.contract import doors
from tests.inference.conftest import NETWORK, SETTINGS, STACKED, H

MODELS = [*SETTINGS, "stack"]


def changed(path, target, **facts):
    """Write a bundle whose description has other facts, with its right hash."""
    whole = Bundle.load(path)
    return doors.write_bundle(replace(whole, description={**whole.description, **facts}), target)


# ---- it predicts as the pipeline does --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_bundle_predict_equals_frame_of_pipeline_predict(trained, bundle_file, raw_bars, model):
    bundle = Bundle.load(bundle_file(model))
    for all_rows in (False, True):
        predicted = pipeline.predict(trained(model), "DEMO", H, model, all_rows=all_rows)
        # the test rows lie within one session
        assert ("without a probability" in predicted.summary()) == (all_rows and model in ("lstm", "stack"))
        assert (predicted.rows_without_probability > 0) == ("without a probability" in predicted.summary())
        wanted = predicted.frame
        got = bundle.predict(raw_bars, all_rows=all_rows)
        pd.testing.assert_frame_equal(got, wanted, check_exact=True)
        assert len(got) > 50 and set(got["split"]) <= ({"test", "new"} if not all_rows else {*got["split"]})


def test_bundle_with_custom_feature_is_refused_where_it_is_absent_or_another(prepared, tmp_path):
    @doors.feature(memory=4)
    def high_over_low(bars):
        return np.log(bars.high / bars.low)

    settings = doors.DataSpec(
        features=doors.FeatureSpec(frames=(60,), families=("calendar",), custom=("high_over_low",))
    )
    pipeline.prepare(prepared, "DEMO", (H,), settings=settings)
    pipeline.train(prepared, "DEMO", H, "linear", mirror="off", model_settings={"rounds": 5})
    path = pipeline.export(prepared, "DEMO", H, "linear", formats=("bundle",), out=tmp_path).paths["bundle"]
    bars = pd.read_parquet(prepared.raw_bars("DEMO"))
    wanted = pipeline.predict(prepared, "DEMO", H, "linear").frame
    pd.testing.assert_frame_equal(Bundle.load(path).predict(bars), wanted, check_exact=True)
    with doors.no_features(), pytest.raises(SettingsError, match=r"not defined here.*got 'high_over_low'.*--import"):
        Bundle.load(path)

    @doors.feature(memory=4, name="high_over_low")
    def another(bars):
        return np.log(bars.high / bars.low) + 1

    with pytest.raises(SettingsError, match=r"not the one the data was prepared with.*source .*wanted source"):
        Bundle.load(path)


def test_bundle_with_own_network_that_was_changed_since_is_refused(prepared, tmp_path, restored_models):
    class Mine(doors.GRU):
        pass

    doors.register_model("mine", Mine, family="sequence")
    pipeline.train(prepared, "DEMO", H, "mine", mirror="off", model_settings={**NETWORK, "epochs": 1})
    path = pipeline.export(prepared, "DEMO", H, "mine", formats=("bundle",), out=tmp_path).paths["bundle"]
    assert Bundle.load(path).description["networks"] == {"mine": doors.registered_source_hash("mine")}
    other = type("Mine", (Mine,), {"own": 1})
    doors.register_model("mine", other, family="sequence")
    with pytest.raises(SettingsError, match=r"network mine is not the one in this bundle.*source .*wanted source"):
        Bundle.load(path)


# ---- what does not fit is named --------------------------------------------------------------------------------------


def test_bundle_predict_of_bars_on_another_tick_raises(bundle_file, raw_bars):
    bundle = Bundle.load(bundle_file("linear"))
    shifted = raw_bars.assign(**{name: raw_bars[name] + 0.1 for name in ("open", "high", "low", "close")})
    with pytest.raises(BarsError, match=r"another tick.*DEMO.*off the tick of 0.25.*wanted prices that are multiples"):
        bundle.predict(shifted)
    few = raw_bars.copy()
    few.loc[:100, "high"] += 0.1
    assert len(bundle.predict(few))


@pytest.mark.parametrize("model", MODELS)
def test_bundle_that_predicts_its_example_otherwise_is_refused(bundle_file, tmp_path, model):
    whole = Bundle.load(bundle_file(model))
    p_N3, columns = whole.example["p"], whole.example["columns"]
    shifted = p_N3 + 2e-5 * (np.arange(len(p_N3)) == 7)[:, None]
    # the small linear model is no better than the clock, and reads no price
    for changed in [{"p": shifted}] + [{"columns": columns | {"close": columns["open"]}}] * (model != "linear"):
        doors.write_bundle(replace(whole, example={**whole.example, **changed}), tmp_path / "b")
        with pytest.raises(SettingsError, match=r"predicts its example otherwise here.*wanted those of ml_factory 0"):
            Bundle.load(tmp_path / "b")


def test_bundle_load_with_other_feature_columns_raises(bundle_file, tmp_path):
    whole = replace(Bundle.load(bundle_file("linear")), example={})
    names = list(whole.description["feature_names"])
    path = changed(doors.write_bundle(whole, tmp_path / "a"), tmp_path / "b", feature_names=[*names[:-1], "invented"])
    with pytest.raises(SettingsError, match=r"other columns here.*invented"):
        Bundle.load(path)
    ((name, data),) = whole.models.items()
    state = doors.deserialize_state(data) | {"feature_names": [names[1], names[0], *names[2:]]}
    doors.write_bundle(replace(whole, models={name: doors.serialize_state(state)}), path)
    with pytest.raises(SettingsError, match=r"other columns here.*another order"):
        Bundle.load(path)


def test_bundle_load_of_registered_model_or_other_state_raises(trained, bundle_file, tmp_path):
    (registered,) = trained("linear").models.glob("DEMO/model-linear-*/state.safetensors")
    with pytest.raises(CheckpointError, match=r"got a registered model.*ml_factory export"):
        Bundle.load(registered)
    state = doors.deserialize_state(bundle_file("linear").read_bytes())
    whole = bundle_file("linear").read_bytes()
    changed = whole.replace(b'"temperature":', b'"temperaturf":', 1)
    foreign = [doors.serialize_state(one) for one in ({"models": {}}, {"other": 1, "reference": None})]
    hashed = [doors.serialize_state(state | {"content": one, "sha256": sha256(one).hexdigest()}) for one in foreign]
    for data, message in (
        *((one, "bundle is damaged.*export it again") for one in hashed),
        (doors.serialize_state({name: state[name] for name in ("format", "content")}), "was changed, or is damaged"),
        (changed, "was changed, or is damaged"), (whole[:-100], "cut short"),
        (b"\xff" * 7 + b"\x7f" + whole[8:], "no bundle"),
    ):  # fmt: skip
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(CheckpointError, match=message) as error:
            Bundle.load(tmp_path / "a")
        assert "\n" not in str(error.value) and len(str(error.value)) < 700


# ---- a file from anywhere --------------------------------------------------------------------------------------------


def test_bundle_load_imports_no_module_that_the_file_names(bundle_file, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("open(__file__ + '.ran', 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    own = {"secret": {"module": "evil_module", "hash": "0" * 12}}
    path = changed(bundle_file("linear"), tmp_path / "b", custom=own)
    Bundle.load(path)
    assert "evil_module" not in sys.modules and not os.path.exists(tmp_path / "evil_module.py.ran")


# ---- export ----------------------------------------------------------------------------------------------------------


def test_export_bundle_writes_card_of_the_same_facts(trained, tmp_path, call):
    workspace = trained("stack")
    words = ["--workspace", workspace.root, "--symbol", "DEMO", "--horizon", H, "--model", "stack", "--out", tmp_path]
    code, out, err = call("export", *words, "--format", "bundle", "--json")
    assert code == 0, err
    paths = json.loads(out)["paths"]
    bundle, card = Bundle.load(paths["bundle"]), Path(paths["card"]).read_text(encoding="utf-8")
    facts = bundle.description
    assert card == bundle.card and {p.name for p in tmp_path.iterdir()} == {"DEMO-h5-stack.bundle", "DEMO-h5-stack.md"}
    settings = {name: SETTINGS[name] for name in STACKED}
    own = pipeline.stack(workspace, "DEMO", H, STACKED, folds=2, mirror="off", model_settings=settings).metrics
    for stored, row in zip(facts["metrics"], own.to_dict("records"), strict=True):
        assert stored == {name: row[name] for name in stored}
        line = next(line for line in card.splitlines() if line.startswith(f"| {row['split']} | {row['name']} |"))
        assert f"| {row['log_loss']:.4f} |" in line and f" {row['rows']:,} | {row['effective_rows']:,.0f} |" in line
        gains = [row[name] for name in ("gain_best", "gain_best_low", "gain_best_high")]
        assert "|".join(" - " if pd.isna(one) else f" {one:+.4f} " for one in gains) in line
    texts = "tick 0.25", "calendar cme", "quick, ", "base model: lstm"
    assert not [one for one in (*texts, facts["run_id"], facts["split_times"]["test"]) if one not in card]
    assert f"waits for {facts['warmup_bars']:,} base bars" in card and facts["warmup_bars"] > 640
