"""The verbs of `tpu` on the command line, with the stand-in for gcloud: states, exit codes, questions, JSON."""

import io
import json
import sys
import tarfile

import pytest


@pytest.fixture
def tpu(play, call):
    """Call it with a scenario: (the play, function that runs a verb and returns code, output, errors)."""

    def make(scenario: dict, **values: str):
        one = play(scenario, **values)

        def run(verb: str, *words: object):
            place = "--config", one.config, "--workspace", one.folder / "workspace"
            waits = ("--poll", "0.01") if verb in ("setup", "resume", "monitor") else ()
            return call("tpu", verb, *words, *place, *waits)

        return one, run

    return make


def test_tpu_verbs_from_setup_to_cleanup_print_states_and_exit_codes(tpu, monkeypatch):
    one, run = tpu(
        {
            "request": ["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"],
            "state": ["running", "running", "ended 0"],
        }
    )
    code, out, err = run("setup", "--no-wait")
    assert code == 0 and "my-tpu: WAITING" in out and "16 chips on 4 workers" in err
    code, out, _ = run("resume", "--json")
    assert code == 0 and json.loads(out) == {"name": "my-tpu", "phase": "RUNNING", "detail": ""}
    assert json.loads(run("status", "--json")[1])["detail"] == "4 workers"
    assert run("logs", "2", "--lines", "7")[1] == "step 1\nstep 2\n" and one.count("worker.sh log 7") == 1
    code, out, err = run("monitor")
    assert code == 0 and "FINISHED" in out and err.splitlines() == ["step 1", "step 2"]
    assert run("ssh", "3")[0] == 0 and one.count("ssh my-tpu --worker=3 --zone") == 1
    assert run("stop")[0] == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    code, out, err = run("cleanup")
    assert code != 0 and "Nothing was deleted" in err and "Kept: gs://my-bucket" in err
    assert one.count("queued-resources delete") == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, out, _ = run("cleanup")
    assert code == 0 and "DELETED" in out and one.count("queued-resources delete my-tpu-qr --force") == 1


def test_tpu_verb_that_leaves_work_exits_1_with_one_line(tpu):
    _, run = tpu({"request": ["FAILED: no capacity"]})
    code, out, err = run("setup")
    assert code == 1 and out == "" and err.splitlines()[-1].count("REQUEST_FAILED") == 1
    code, out, _ = run("status", "--json")
    assert code == 1 and json.loads(out)["phase"] == "REQUEST_FAILED"


def test_tpu_setup_packs_the_guides_config_with_the_bucket(tpu):
    one, run = tpu({"request": ["ACTIVE"]})
    assert run("setup")[0] == 0
    [archive] = (one.folder / "workspace" / "tpu").rglob("ml_factory_code.tar.gz")
    with tarfile.open(archive) as packed:
        assert b"output_dir: gs://my-bucket/sdce" in packed.extractfile("config.yaml").read()


@pytest.mark.parametrize("verb", ["setup", "resume"])
@pytest.mark.parametrize("flag", ["--config ", "--config="])
def test_tpu_refuses_a_config_that_workers_would_not_have_before_the_first_call(tpu, verb, flag):
    one, run = tpu({"request": ["ACTIVE"]}, COMMAND=f"python train.py {flag}config.yaml")
    code, _, err = run(verb)
    assert code == 2 and "COMMAND" in err and "got config.yaml" in err and "set CONFIG" in err and one.calls() == []


def test_tpu_quotes_the_reason_of_gcloud_and_not_its_last_lines(tpu):
    _, run = tpu({"create": ["long"]})
    code, _, err = run("setup")
    assert code == 1 and "FAILED_PRECONDITION: the network default is absent" in err, err
