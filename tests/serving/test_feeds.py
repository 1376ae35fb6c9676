"""/feeds: each bar answered as by the batch once it is on the disk, and kept over kills and restarts."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ml_factory.evaluation.metrics import PROBABILITIES as P
from tests.serving.conftest import FeedClient, running_server

HISTORY = 8000


def test_feeds_of_other_names_and_symbols_are_separate_and_wrong_names_and_first_bars_make_none(client, made):
    first, second = made.bars["MES"].iloc[:100], made.bars["MES"].iloc[100:101]
    assert FeedClient(client, "left").push("MES", first)["repeated"] == 0
    assert FeedClient(client, "right").push("MES", second)["lacking_bars"] > 100
    assert FeedClient(client, "left").push("MES", first)["repeated"] == 100
    other = FeedClient(client, "left").push("DEMO", made.bars["DEMO"].iloc[:100])
    assert other["repeated"] == 0 and other["symbol"] == "DEMO" and other["run_id"].startswith("train-xgboost")
    for name in ("a b", "a.b", "x" * 41):
        assert FeedClient(client, name).push("MES", first)["status"] == 422
    assert FeedClient(client, "wrong").push("MES", first.assign(high=1.0))["status"] == 422
    assert {"left", "right"} <= {one["feed"] for one in client.get("/info").json()["feeds"]} - {"wrong"}


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_feed_of_killed_server_lost_no_answered_bar_and_goes_on_as_uninterrupted(made, tmp_path, number):
    bars, bundle, answers, place = made.bars["DEMO"], made.bundles["DEMO", "xgboost"], {}, HISTORY
    for count in (60, None):
        with running_server(bundle, "--state", tmp_path / "state") as server, server.client() as client:
            feed = FeedClient(client, "killed")
            if place == HISTORY:
                feed.push("DEMO", bars.iloc[:HISTORY])
            else:
                (stored,) = client.get("/info").json()["feeds"]
                assert stored["last_bar_end"] == bars["timestamp"].iloc[place].isoformat()
                again = feed.push("DEMO", bars.iloc[place - 30 : place])
                assert again["repeated"] == 30 and all(answers[one["known_at"]] == one for one in again["answers"])
            for _ in range(count or 40):
                reply = feed.push("DEMO", bars.iloc[place : place + 1])
                assert reply["repeated"] == 0, reply
                place += 1
                answers |= {one["known_at"]: one for one in reply["answers"]}
            assert count is None or server.stop(number) == (-number if number == signal.SIGKILL else 0)
    frame = made.load("DEMO", "xgboost").predict(bars.iloc[:place], all_rows=True)
    wanted = {moment.isoformat(): row for moment, row in zip(frame.index, frame[P].to_numpy().tolist(), strict=True)}
    assert all([one[name] for name in P] == wanted[moment] for moment, one in answers.items())
    known = [moment for moment in wanted if moment > bars["timestamp"][HISTORY].isoformat()]
    assert set(known[:-1]) <= set(answers)


def test_feed_that_several_clients_push_at_once_takes_each_bar_once_and_answers_as_the_batch(server, made):
    bars, clients = made.bars["DEMO"].iloc[: HISTORY + 60], 4
    wanted = made.load("DEMO", "xgboost").predict(bars, all_rows=True)[P]
    with server.client() as client, ThreadPoolExecutor(clients) as pool:
        feed, answers = FeedClient(client, "shared"), []
        feed.push("DEMO", bars.iloc[:HISTORY])
        for place in range(HISTORY, len(bars)):
            replies = list(pool.map(lambda one: feed.push("DEMO", one), [bars.iloc[place : place + 1]] * clients))
            assert sorted(one["repeated"] for one in replies) == [0] + [1] * (clients - 1)
            assert all(one["answers"] == replies[0]["answers"] for one in replies)
            answers += replies[0]["answers"]
    assert len(answers) > 9
    assert all([one[name] for name in P] == wanted.loc[one["known_at"]].tolist() for one in answers)


def test_two_servers_on_one_state_folder_are_refused(made, tmp_path, call):
    bundle = made.bundles["MES", "linear"]
    with running_server(bundle, "--state", tmp_path):
        code, _, err = call("serve", bundle, "--port", 0, "--state", tmp_path)
    assert code == 1 and err.startswith("error: Another process is working on this folder of feeds")
