"""Life of a slice against the stand-in for gcloud: every scenario ends in one clear phase or error."""

import pytest

from ml_factory.tpu.gcloud import GcloudError

W, A = "WAITING_FOR_RESOURCES", "ACTIVE"
# name -> (verb, answers, phase at the end or "", kind of the error or "", requests for the slice)
QUICK = {
    "setup_waiting_then_active": ("setup", {"request": [W, "PROVISIONING", A]}, "RUNNING", "", 1),
    "setup_quota_refused": ("setup", {"create": ["quota"]}, "", "quota", 0),
    "setup_request_fails": ("setup", {"request": [W, "FAILED: no capacity in this zone"]}, "REQUEST_FAILED", "", 1),
    "setup_suspended_asks_again": ("setup", {"request": [W, "SUSPENDED", W, A]}, "RUNNING", "", 2),
    "setup_machines_preempted": ("setup", {"machine": ["PREEMPTED", "READY"]}, "RUNNING", "", 2),
    "setup_ssh_timeout_once": ("setup", {"install": ["timeout", "ok"]}, "RUNNING", "", 1),
    "setup_ssh_timeout_always": ("setup", {"unpack": ["timeout"]}, "", "connection", 1),
    "setup_install_fails": ("setup", {"install": ["pip"]}, "", "other", 1),
    "setup_answer_no_json": ("setup", {"request": ["not json"]}, "", "other", 1),
    "setup_answer_no_object": ("setup", {"request": ["[1]"]}, "", "other", 1),
    "monitor_preempted_then_finished": (
        "monitor", {"machine": ["READY", "PREEMPTED", "PREEMPTED", "READY"], "state": ["running", "ended 0"]},
        "FINISHED", "", 2),
    "monitor_training_fails": ("monitor", {"state": ["running", "ended 0,ended 1"]}, "TRAINING_FAILED", "", 1),
}  # fmt: skip
SOAK = {
    "setup_forbidden": ("setup", {"services enable": ["forbidden"]}, "", "permission", 0),
    "setup_bucket_of_others": ("setup", {"buckets": ["forbidden"]}, "", "permission", 0),
    "setup_warning_of_quota_project": ("setup", {"buckets": ["warned"]}, "RUNNING", "", 1),
    "setup_bucket_is_there": ("setup", {"buckets": ["there"]}, "RUNNING", "", 1),
    "setup_always_preempted": ("setup", {"request": ["SUSPENDED"]}, "PREEMPTED", "", 4),
    "setup_suspending": ("setup", {"request": ["SUSPENDING", A]}, "RUNNING", "", 2),
    "setup_machines_terminated": ("setup", {"machine": ["TERMINATED", "READY"]}, "RUNNING", "", 2),
    "setup_machines_missing": ("setup", {"machine": ["missing", "READY"]}, "RUNNING", "", 2),
    "setup_unknown_state": ("setup", {"request": ["NEVER_HEARD_OF"]}, "", "other", 1),
    "setup_copy_timeout_twice": ("setup", {"copy": ["timeout", "timeout", "ok"]}, "RUNNING", "", 1),
    "setup_delete_refused": ("setup", {"request": ["SUSPENDED"], "delete": ["forbidden"]}, "", "permission", 1),
    "monitor_worker_dies": ("monitor", {"state": ["running", "running,died"]}, "TRAINING_FAILED", "", 1),
    "monitor_unreachable": ("monitor", {"state": ["running", "timeout"]}, "", "connection", 1),
    "monitor_preempted_then_quota": (
        "monitor", {"machine": ["READY", "PREEMPTED"], "create": ["ok", "quota"]}, "", "quota", 1),
}  # fmt: skip


def run_scenario(play, verb, answers, phase, kind, requests):
    one = play(answers, REQUESTS="4")
    slices, found, end = [one.open(), one.open()], "", ""
    try:
        end = slices[0].setup().phase
        if verb == "monitor":
            end = ""
            end = slices[1].watch().phase
    except GcloudError as error:
        found = error.kind
        assert "Next:" in str(error) and "\n" not in str(error) and "grammar" not in str(error)
    assert (end, found, sum(slice_.requests for slice_ in slices)) == (phase, kind, requests)
    assert not one.count("buckets delete") and not one.count("storage rm")
    return one


@pytest.mark.parametrize("name", QUICK)
def test_slice_scenario_ends_in_clear_phase(play, name):
    run_scenario(play, *QUICK[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", SOAK)
def test_slice_rare_scenario_ends_in_clear_phase(play, name):
    run_scenario(play, *SOAK[name])


def test_resume_after_closed_terminal_requests_nothing_twice(play):
    one = play({"request": ["WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "ACTIVE"]})
    assert one.open().setup(wait=False).phase == "WAITING"
    state = one.open().resume()  # another process: everything it knows is in the cloud
    assert (state.phase, one.count("queued-resources create")) == ("RUNNING", 1)
    assert one.count("buckets create") == 1


def test_setup_gives_key_only_on_standard_input_and_keeps_it_out_of_files(play):
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


def test_gcloud_that_never_answers_ends_at_deadline(play):
    one = play({})
    (one.folder / "bin" / "gcloud").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(GcloudError, match="timed out"):
        one.open(seconds=0.3).setup()


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


def test_resume_looks_at_training_that_was_running_and_stops_all_workers_before_it_starts_again(play):
    one = play({"state": ["running,died,running,running", "running"]})
    assert one.open().setup().phase == "RUNNING"
    assert one.open().resume().phase == "RUNNING"  # one of the workers had died since
    actions = [call["words"][-4].split()[-1] for call in one.calls() if "ssh" in call["words"]]
    assert actions == ["state", "unpack", "install", "start", "state", "stop", "unpack", "install", "start"]


def test_training_is_finished_only_when_every_worker_says_so(play):
    one = play({"state": ["ended 0,ended 0,ended 0", "ended 0"]})
    one.open().setup()
    state = one.open().look()
    assert (state.phase, state.detail) == ("UNREACHABLE", "3 of 4 workers answered")
    assert one.open().look().phase == "FINISHED"


def test_resume_requests_again_after_a_request_that_failed(play):
    one = play({"request": ["FAILED: no capacity", "FAILED: no capacity", "ACTIVE"]})
    assert one.open().setup().phase == "REQUEST_FAILED"
    assert one.open().resume().phase == "RUNNING"
    assert one.count("queued-resources delete") == 1 and one.count("queued-resources create") == 2


def test_resume_requests_once_again_where_requests_go_on_failing(play):
    one = play({"request": ["FAILED: no capacity"]})
    assert one.open().setup().phase == one.open().resume().phase == "REQUEST_FAILED"
    assert one.count("queued-resources create") == 2


def test_resume_that_used_its_requests_returns_the_reason_of_the_last_failure(play):
    one = play({"request": ["SUSPENDED", "SUSPENDED", "FAILED: no capacity"]}, REQUESTS="1")
    assert one.open().setup().phase == "PREEMPTED"
    state = one.open().resume()
    assert state.phase == "REQUEST_FAILED" and "no capacity" in state.detail
