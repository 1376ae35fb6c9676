"""The table of messages in docs/guide.md, compared with what the commands print."""

import re
import signal
import socket
from pathlib import Path

import pytest

from ml_factory.workflows import export_data
from tests.questdb_server import questdb_server
from tests.serving.conftest import columns_of

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
CASES = (
    "wrong bundle", "truncated bundle", "port in use", "wrong symbol", "stale bar", "missing column", "hostile SQL",
    "interrupted export",
)  # fmt: skip
BAR_COLUMNS = [("symbol", "SYMBOL"), ("ts", "TIMESTAMP"), ("open", "DOUBLE")]


@pytest.fixture(scope="module")
def quest():
    with questdb_server() as server:
        server.add_table("bars", BAR_COLUMNS, [("MES", "2024-01-01T00:00:00.000000Z", 1.0)])
        yield server


def printed(case: str, made, client, quest, call, tmp_path, monkeypatch) -> str:
    """Return the line that a user sees."""
    good, words = made.bundles["DEMO", "linear"], ()
    bars = columns_of(made.bars["DEMO"])
    if case in ("wrong symbol", "stale bar", "missing column"):
        body = {"symbol": "NQ" if case == "wrong symbol" else "DEMO", "bars": bars, "live": case == "stale bar"}
        if case == "missing column":
            del bars["low"]
        answer = client.post("/predict", json=body).json()
        return answer["message"] if "message" in answer else answer["answers"][-1]["reason"]
    if case == "wrong bundle":
        (path,) = (good.parents[1] / "workspace" / "models" / "DEMO").glob("model-linear-*/state.safetensors")
        words = ("serve", path)
    elif case == "truncated bundle":
        (tmp_path / "cut.bundle").write_bytes(good.read_bytes()[:-1000])
        words = ("serve", tmp_path / "cut.bundle")
    elif case == "port in use":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            return call("serve", good, "--port", taken.getsockname()[1])[2].splitlines()[-1]
    else:
        table = "bars; DROP TABLE bars" if case == "hostile SQL" else "bars"
        words = ("export-data", "--source", quest.source, "--table", table, "--symbol", "MES")
        words += ("--output", tmp_path / "bars.parquet")
        if case == "interrupted export":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job begins with it ignored
            monkeypatch.setattr(export_data, "SelectedRows", lambda *given: signal.raise_signal(signal.SIGINT))
    return call(*words)[2].splitlines()[-1]


@pytest.mark.parametrize("case", CASES)
def test_guide_message_is_what_the_command_prints(case, made, client, quest, call, tmp_path, monkeypatch):
    (row,) = re.findall(rf"^\| {case} \| `(.*)` \|$", GUIDE, re.MULTILINE)
    line = printed(case, made, client, quest, call, tmp_path, monkeypatch)
    wanted = ".*".join(re.escape(part) for part in row.split("…"))
    assert re.fullmatch(wanted, line), f"| {case} | `{line}` |"
    assert "Next: " in line or case in ("stale bar", "interrupted export")
    if case == "hostile SQL":
        assert quest.tables.keys() == {"bars"} and not any("DROP" in query for query in quest.queries)
