"""Ctrl-C and SIGTERM on the command line: one line that says how the run continues, and the exit code of a shell."""

import shlex
import signal
import threading

import pytest

from ml_factory import pipeline
from tests.contract.doors import interrupt_message, interruptible


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_cli_train_on_signal_prints_resume_command_and_signal_exit_code(number, code, call, monkeypatch, tmp_path):
    monkeypatch.setattr(pipeline, "train", lambda *_, **__: signal.raise_signal(number))
    (tmp_path / "two words").mkdir()  # all that is read before the work begins
    before = [signal.signal(one, signal.default_int_handler) for one in (signal.SIGINT, signal.SIGTERM)]
    try:
        got, out, err = call("train", "--symbol", "MES", "--fresh", "--workspace", tmp_path / "two words")
        assert signal.getsignal(number) is signal.default_int_handler  # ours is gone
    finally:
        for one, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(one, handler)
    assert (got, out) == (code, "")
    command = f"python -m ml_factory train --symbol MES --workspace '{tmp_path}/two words'"
    assert err == f"interrupted by {number.name}. The same command resumes the run: {command}\n"


@pytest.mark.parametrize(
    ("words", "resumed"),
    [
        (["predict", "--symbol", "MES"], False), ([], False), (["auto"], True), (["recipe"], False),
        (["recipe", "shards", "x"], False),
        *((["recipe", name, "--fake-data"], True) for name in ("resnet50", "sdce", "t5", "compress")),
    ],
)  # fmt: skip
def test_interrupt_message_states_whether_verb_resumes(words, resumed):
    what = "The same command resumes the run: " if resumed else "The same command starts again: "
    assert what + shlex.join(["python", "-m", "ml_factory", *words]) in interrupt_message(signal.SIGINT, words)


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("train --fresh=true --seed 1", "train --seed 1"), ("run 02 -p FRESH=True -p SEED=1", "run 02 -p SEED=1"),
        ("auto --config=a.toml --fresh", "auto --config=a.toml --fresh=false"), ("prepare --config a.toml",) * 2,
    ],
)  # fmt: skip
def test_command_that_resumes_opens_no_other_run(words, again):
    assert interrupt_message(signal.SIGINT, words.split()).endswith(f"resumes the run: python -m ml_factory {again}")


def test_interruptible_keeps_ignored_signals_and_runs_in_other_threads():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    failed = []

    def inside() -> None:
        try:
            with interruptible():
                pass
        except ValueError as error:  # "signal only works in main thread"
            failed.append(error)

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert failed == []
