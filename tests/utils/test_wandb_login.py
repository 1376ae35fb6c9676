"""The question for a W&B key, asked by a real kernel of a front end that can and of one that cannot answer."""

import os
import queue
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
SETUP = """
from utils.colab_setup import setup_colab_environment
info = setup_colab_environment({workspace!r}, install=False)
print("TRACKING", info.tracking)
"""


@pytest.fixture
def kernel(tmp_path):
    """Client of a kernel whose home folder is empty."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("WANDB_", "ML_FACTORY_"))}
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    manager, client = start_new_kernel(kernel_name="python3", env={**kept, **home}, cwd=str(tmp_path))
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def set_up(client, workspace: Path, *, answer: str | None) -> tuple[str, int]:
    """Return the output of a cell that sets up this workspace, and the number of prompts; answer None: no user can
    answer.
    """
    printed, questions = [], 0
    client.execute(SETUP.format(workspace=str(workspace)), allow_stdin=answer is not None)
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
        assert message["msg_type"] != "error", message["content"]["traceback"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return "".join(printed), questions
        try:
            calls = client.get_stdin_msg(timeout=0.2 if answer is not None else 0)
        except queue.Empty:
            continue
        assert calls["content"]["password"]  # the key is not shown as it is typed
        questions += 1
        client.input(answer)


def test_wandb_login_without_frontend_input_shows_no_prompt(kernel, tmp_path):
    printed, questions = set_up(kernel, tmp_path / "work", answer=None)
    assert questions == 0 and "TRACKING offline" in printed
    assert not (tmp_path / "work" / "wandb_login.txt").exists()


def test_wandb_login_empty_answer_is_remembered_in_workspace(kernel, tmp_path):
    printed, questions = set_up(kernel, tmp_path / "work", answer="")
    assert questions == 1 and "TRACKING offline" in printed
    printed, questions = set_up(kernel, tmp_path / "work", answer=KEY)
    assert questions == 0 and "wandb_login.txt" in printed


def test_wandb_login_key_logs_in_all_notebooks_of_machine(kernel, tmp_path):
    printed, questions = set_up(kernel, tmp_path / "work", answer=KEY)
    assert questions == 1 and "TRACKING online" in printed, printed
    assert KEY in (tmp_path / ".netrc").read_text()
    again, questions = set_up(kernel, tmp_path / "other", answer="")
    assert questions == 0 and "TRACKING online" in again
    assert KEY not in printed + again
    files = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in files)


def test_wandb_login_invalid_key_is_refused_and_prompted_again(kernel, tmp_path):
    printed, questions = set_up(kernel, tmp_path / "work", answer="not a key")
    assert questions == 1 and "TRACKING offline" in printed and "refused" in printed
    assert "not a key" not in printed
    assert set_up(kernel, tmp_path / "work", answer="")[1] == 1
