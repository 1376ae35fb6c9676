"""Life of a slice against the stand-in for gcloud: every scenario ends in one clear phase or error."""

import subprocess

import pytest

from tests.contract.doors import GcloudError, gcloud

W, A = "WAITING_FOR_RESOURCES", "ACTIVE"
FAILED, LOST = "FAILED: no capacity in this zone", ["SUSPENDED"]
# name -> (answers, verbs, each by a command of its own; phase or kind of the error that each ends with; requests)
QUICK = {
    "waiting_then_active": ({"request": [W, "PROVISIONING", A]}, "setup", "RUNNING", 1),
    "closed_terminal": ({"request": [W, W, A]}, "begin resume", "WAITING RUNNING", 1),
    "quota_refused": ({"create": ["quota"]}, "setup", "quota", 0),
    "request_fails": ({"request": [W, FAILED]}, "setup", "REQUEST_FAILED", 1),
    "request_fails_once": ({"request": [FAILED, FAILED, A]}, "setup resume", "REQUEST_FAILED RUNNING", 2),
    "request_goes_on_failing": ({"request": [FAILED]}, "setup resume", "REQUEST_FAILED REQUEST_FAILED", 2),
    "suspended_then_fails": (
        {"request": [*LOST * 2, FAILED], "most": "1"}, "setup resume", "PREEMPTED REQUEST_FAILED", 2),
    "suspended_asks_again": ({"request": [W, *LOST, W, A]}, "setup", "RUNNING", 2),
    "machines_preempted": ({"machine": ["PREEMPTED", "READY"]}, "setup", "RUNNING", 2),
    "ssh_timeout_once": ({"install": ["timeout", "ok"]}, "setup", "RUNNING", 1),
    "ssh_timeout_always": ({"unpack": ["timeout"]}, "setup", "connection", 1),
    "install_fails": ({"install": ["pip"]}, "setup", "other", 1),
    "answer_no_json": ({"request": ["not json"]}, "setup", "other", 1),
    "answer_no_object": ({"request": ["[1]"]}, "setup", "other", 1),
    "preempted_in_training": (
        {"machine": ["READY", "PREEMPTED", "PREEMPTED", "READY"], "state": ["running", "ended 0"]}, "setup watch",
        "RUNNING FINISHED", 2),
    "training_fails": ({"state": ["running", "ended 0,ended 1"]}, "setup watch", "RUNNING TRAINING_FAILED", 1),
    "three_workers_answer": (
        {"state": ["ended 0,ended 0,ended 0", "ended 0"]}, "setup look look", "RUNNING UNREACHABLE FINISHED", 1),
}  # fmt: skip
SOAK = {
    "forbidden": ({"services enable": ["forbidden"]}, "setup", "permission", 0),
    "bucket_of_others": ({"buckets": ["forbidden"]}, "setup", "permission", 0),
    "warning_of_quota_project": ({"buckets": ["warned"]}, "setup", "RUNNING", 1),
    "bucket_is_there": ({"buckets": ["there"]}, "setup", "RUNNING", 1),
    "always_preempted": ({"request": LOST}, "setup", "PREEMPTED", 4),
    "suspending": ({"request": ["SUSPENDING", A]}, "setup", "RUNNING", 2),
    "machines_terminated": ({"machine": ["TERMINATED", "READY"]}, "setup", "RUNNING", 2),
    "machines_missing": ({"machine": ["missing", "READY"]}, "setup", "RUNNING", 2),
    "unknown_state": ({"request": ["NEVER_HEARD_OF"]}, "setup", "other", 1),
    "copy_timeout_twice": ({"copy": ["timeout", "timeout", "ok"]}, "setup", "RUNNING", 1),
    "delete_refused": ({"request": LOST, "delete": ["forbidden"]}, "setup", "permission", 1),
    "worker_dies": ({"state": ["running", "running,died"]}, "setup watch", "RUNNING TRAINING_FAILED", 1),
    "unreachable": ({"state": ["running", "timeout"]}, "setup watch", "RUNNING connection", 1),
    "preempted_then_quota": (
        {"machine": ["READY", "PREEMPTED"], "create": ["ok", "quota"]}, "setup watch", "RUNNING quota", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)])
def test_slice_scenario_ends_in_clear_phase(play, name):
    answers, verbs, wanted, requests = (QUICK | SOAK)[name]
    one, found, made = play(answers, REQUESTS=answers.get("most", "4")), [], 0
    for verb in verbs.split():
        slice_ = one.open()  # another process: everything it knows is in the cloud
        try:
            state = slice_.setup(wait=False) if verb == "begin" else getattr(slice_, verb)()
            found.append(state.phase)
            assert "FAILED" not in state.phase or state.detail
        except GcloudError as error:
            found.append(error.kind)
            assert "Next:" in str(error) and "\n" not in str(error) and "grammar" not in str(error)
        made += slice_.requests
    assert (found, made) == (wanted.split(), requests)
    assert not one.count("buckets delete") and not one.count("storage rm") and one.count("buckets create") <= 1


def test_setup_gives_key_only_on_standard_input_and_keeps_it_out_of_files(play, monkeypatch):
    monkeypatch.setattr(gcloud, "subprocess", subprocess)  # a process of its own for each call
    key = "0123456789abcdef0123"
    one = play({}, WANDB_API_KEY=key)
    one.open().setup()
    given = [call for call in one.calls() if key in call["stdin"]]
    assert [call["words"][:2] for call in given] == [["secrets", "create"]]
    assert not any(key in word for call in one.calls() for word in call["words"])
    files = [path for path in (one.folder / "files").rglob("*") if path.is_file()]
    assert len(files) == 2 and not any(key.encode() in path.read_bytes() for path in files)
    assert not any(key in line for line in one.lines)


def test_dry_run_prints_commands_of_real_run_and_calls_nothing(play):
    one = play({})
    one.open(dry_run=True).setup()
    printed = [line for line in one.lines if line.startswith("gcloud ")]
    assert one.calls() == [] and "COMMAND: python recipes/train.py --config config.yaml --device tpu" in one.lines
    assert f"CONFIG: {one.folder / 'code' / 'recipes' / 'config_tinyllama_tpuv4.yaml'}" in one.lines
    one.open().setup()
    real = {tuple(call["words"][:4]) for call in one.calls()} - {("compute", "tpus", "tpu-vm", "describe")}
    assert {tuple(line.split()[1:5]) for line in printed} == real


def test_cleanup_deletes_slice_and_keeps_bucket(play):
    one = play({})
    one.open().setup()
    slice_ = one.open()
    assert slice_.objects_to_delete() == ["TPU my-tpu (my-project, us-central2-b)", "queued resource my-tpu-qr"]
    state = slice_.cleanup()
    assert (state.phase, state.detail) == ("DELETED", "kept: gs://my-bucket")
    assert one.count("queued-resources delete my-tpu-qr --force") == 1 and not one.count("storage rm")


def test_gcloud_that_never_answers_ends_at_deadline(play, monkeypatch):
    one = play({})
    monkeypatch.setattr(gcloud, "subprocess", subprocess)
    (one.folder / "bin" / "gcloud").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(gcloud, "SECONDS", 0.3)
    with pytest.raises(GcloudError, match="timed out"):
        one.open().setup()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("ERROR: (gcloud) RESOURCE_EXHAUSTED: no more capacity", "quota"),
        ("WARNING: unexpected quota issues.\n\nERROR: (gcloud) NOT_FOUND: no bucket", "missing"),
        ("ERROR: (gcloud) code 404", "missing"),
        ("ERROR: (gcloud) INVALID_ARGUMENT: project 84042403, port 2200", "other"),
        ("ssh: connect to host 10.0.40.4 port 22: Connection timed out", "connection"),
    ],
)
def test_kind_of_failure_is_read_from_error_and_whole_numbers(message, kind):
    assert GcloudError(("compute",), message).kind == kind


def test_resume_stops_all_workers_of_a_training_that_has_a_dead_one_before_it_starts_again(play):
    one = play({"state": ["running,died,running,running", "running"]})
    assert (one.open().setup().phase, one.open().resume().phase) == ("RUNNING", "RUNNING")
    actions = [call["words"][-4].split()[-1] for call in one.calls() if "ssh" in call["words"]]
    assert actions == ["state", "unpack", "install", "start", "state", "stop", "unpack", "install", "start"]
