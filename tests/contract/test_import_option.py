"""Features and networks of the user on the command line: `--import`."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from ml_factory import Bundle
from tests.contract.doors import SMALL_DATA_WORDS, custom, serving_commands

MODULE = """import numpy as np
from ml_factory.features.custom import feature

@feature(memory=4)
def high_over_low(bars):
    return np.log(bars.high / bars.low){more}
"""


@pytest.fixture
def fresh(monkeypatch):
    """fresh(): as in a new process, with none of the user's own features."""
    before = set(sys.modules)

    def forget() -> None:
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "high_over_low", None):
                del sys.modules[name]
        monkeypatch.setattr(custom, "_FEATURES", {})

    forget()
    yield forget
    forget()


@pytest.fixture
def own_file(tmp_path, fresh):
    """own_file(name, more): a file with a feature of the user's own."""

    def write(name: str = "my_features.py", more: str = ""):
        path = tmp_path / name
        path.write_text(MODULE.format(more=more))
        return path

    return write


def test_cli_prepare_train_export_predict_and_serve_with_imported_feature(
    call, prepared, own_file, fresh, tmp_path, monkeypatch
):
    path, place = own_file(), ("--workspace", prepared.root, "--horizon", 5)
    sets = ("--set", 'features.custom=["high_over_low"]', "--set", "features.frames=[15]",
            "--set", 'features.families=["calendar"]')  # fmt: skip
    train = ("train", *place, "--model", "linear", "--set", "rounds=5")
    line = "features of your own, not built-in: high_over_low"
    code, _, err = call("prepare", *place, "--import", path, *sets)
    assert code == 0 and line in err, err
    code, _, err = call(*train)  # the trained columns hold it, without its code
    assert code == 0 and line in err, err
    fresh()
    code, _, err = call("export", *place, "--model", "linear", "--format", "bundle", "--out", tmp_path)
    assert code == 2 and "--import" in err, err
    code, _, err = call("export", *place, "--model", "linear", "--format", "bundle", "--out", tmp_path,
                          "--import", path)  # fmt: skip
    assert code == 0, err
    fresh()
    code, _, err = call("predict", *place, "--model", "linear", "--import", path, "--out", tmp_path / "p.parquet")
    assert code == 0 and len(pd.read_parquet(tmp_path / "p.parquet")), err
    (bundle,), loaded = tmp_path.glob("*.bundle"), []
    server = SimpleNamespace(run_server=lambda paths, **_: loaded.append(Bundle.load(paths[0])))
    monkeypatch.setattr(serving_commands, "app", server)
    fresh()
    code, _, err = call("serve", bundle)
    assert code == 2 and "high_over_low" in err and "--import" in err
    code, _, err = call("serve", bundle, "--import", path)
    assert code == 0 and len(loaded) == 1, err
    fresh()
    code, _, err = call("serve", bundle, "--import", own_file("others.py", more=" + 1"))
    assert code == 2 and "not the one the data was prepared with" in err


def test_cli_prepare_names_imported_feature_that_it_leaves_out(call, prepared, own_file):
    words = ("prepare", "--workspace", prepared.root, "--horizon", 5, *SMALL_DATA_WORDS)
    code, _, err = call(*words, "--import", own_file())
    assert code == 0 and "imported, not prepared: high_over_low" in err and 'features.custom=["high_over_low"]' in err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("json.py", "", "rename the file"), ("my-features.py", "", "rename the file"),
        ("broken.py", "1 / 0", "ZeroDivisionError"), ("exits.py", "raise SystemExit(0)", "cannot be imported"),
        ("ahead.py", MODULE.format(more=".shift(-1)").replace("np.log", ""), "looks ahead"),
    ],
)  # fmt: skip
def test_cli_import_of_unusable_file_is_refused_in_one_line(name, text, message, call, fresh, tmp_path):
    (tmp_path / name).write_text(text)
    before = sys.modules.get("json")
    code, out, err = call("train", "--workspace", tmp_path / "w", "--import", tmp_path / name)
    assert code in (1, 2) and out == "" and message in err.splitlines()[-1] and "Traceback" not in err
    assert sys.modules.get("json") is before and not {"broken", "exits", "ahead"} & set(sys.modules)


def test_cli_import_is_not_taken_from_a_file_of_options(call, own_file, tmp_path):
    own_file()
    for key in ("import", "own_modules"):
        (tmp_path / "a.toml").write_text(f'{key} = ["{tmp_path}/my_features.py"]')
        code, _, err = call("train", "--workspace", tmp_path, "--config", tmp_path / "a.toml")
        assert code == 2 and "There is no such option" in err and custom.registered_feature_names() == []
