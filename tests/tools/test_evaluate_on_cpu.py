# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A chat endpoint plays a data set with the product's own episode loop, all over loopback."""

import json

import pytest

from recipe.agent_env.evaluate import main
from recipe.agent_env.trajectory_page.dumps import read_dumps
from tests.mock_env_server import EnvScript, MockEnvServer, Step
from tests.tools.chat_server import ChatServer, call, say

MOVE = say(None, call("move", '{"direction": "up"}'))


@pytest.fixture
def service():
    with MockEnvServer() as server:
        solved = {"success": True}
        server.script("game", EnvScript(steps=[Step(reward=0.5), Step(reward=1.0, done=True, info=solved)]))
        server.script("lost", EnvScript(steps=[Step(reward=-1.0, done=True, info={"success": False})]))
        yield server


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"env_name": name, "seed": seed, "env_kwargs": {}} for seed, name in enumerate(["game", "lost", "game"])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(service, data, tmp_path, reply, *options):
    """Exit status, results by environment, dumped episodes in data order, and the endpoint."""
    out, summary = tmp_path / "eval.jsonl", tmp_path / "summary.json"
    with ChatServer(reply) as endpoint:
        arguments = ["--data", str(data), "--env-url", service.url, "--base-url", endpoint.base_url, "--model", "m"]
        status = main([*arguments, "--out", str(out), "--summary", str(summary), *options])
    results = {entry["env_name"]: entry for entry in json.loads(summary.read_text())} if summary.exists() else {}
    return status, results, sorted(read_dumps([out]), key=lambda episode: episode.seed or 0), endpoint


def test_success_and_return_are_counted_per_environment(service, data, tmp_path, capsys):
    status, results, episodes, _ = evaluate(service, data, tmp_path, lambda body: MOVE, "--repeats", "2")
    assert status == 0
    assert (results["game"]["num_episodes"], results["game"]["success_rate"]) == (4, 1.0)
    assert (results["lost"]["success_rate"], results["lost"]["mean_return"]) == (0.0, -1.0)
    assert results["all"]["success_rate"] == pytest.approx(4 / 6)
    assert len(episodes) == 6
    assert "100.0%" in capsys.readouterr().out
    assert service.live_count == 0


def test_dump_is_read_by_the_trajectory_page(service, data, tmp_path):
    _, _, episodes, _ = evaluate(service, data, tmp_path, lambda body: MOVE, "--max-episodes", "1")
    (episode,) = episodes
    assert "Reach the goal." in episode.prompt_text and "You stand at the start." in episode.prompt_text
    assert [turn.reward for turn in episode.turns] == [0.5, 1.0]
    assert episode.turns[0].reply == 'move({"direction": "up"})'
    assert "You moved." in episode.turns[0].observation
    assert (episode.end_reason, episode.success, episode.episode_return) == ("terminated", 1.0, 1.5)


def test_endpoint_is_asked_as_the_options_say(service, data, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    options = ["--temperature", "0.5", "--extra", '{"top_p": 0.9}', "--api-key-env", "MY_KEY"]
    _, _, _, endpoint = evaluate(service, data, tmp_path, lambda body: MOVE, "--max-response-length", "33", *options)
    first = endpoint.requests[0]
    assert (first["model"], first["max_tokens"], first["temperature"], first["top_p"]) == ("m", 33, 0.5, 0.9)
    assert first["tools"][0]["function"]["name"] == "move"
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert all(headers["Authorization"] == "Bearer secret" for headers in endpoint.headers)


@pytest.mark.parametrize("arguments", ['{"direction": "sideways"}', '{"direction": ', "[1]"])
def test_broken_call_is_penalised_and_told_in_its_tool_message(service, data, tmp_path, arguments):
    def reply(body):
        is_first = len(body["messages"]) <= 2
        return say("Hm.", call("move", arguments)) if is_first else MOVE

    _, _, episodes, endpoint = evaluate(service, data, tmp_path, reply, "--max-episodes", "1")
    assert [turn.reward for turn in episodes[0].turns] == [-0.5, 0.5, 1.0]
    second = endpoint.requests[1]["messages"]
    assert second[-2]["tool_calls"][0]["id"] == second[-1]["tool_call_id"]
    assert second[-1]["content"].startswith("Error:")
    assert len(service.episodes[0].actions) == 2


def test_calls_beyond_the_first_are_refused_where_not_allowed(service, data, tmp_path):
    both = say(None, call("move", '{"direction": "up"}'), call("move", '{"direction": "up"}', call_id="c2"))
    _, _, episodes, endpoint = evaluate(service, data, tmp_path, lambda body: both, "--max-episodes", "1")
    assert episodes[0].end_reason == "terminated"
    roles = [message["role"] for message in endpoint.requests[1]["messages"]]
    assert roles[:5] == ["system", "user", "assistant", "tool", "tool"]
    assert "only the first call" in endpoint.requests[1]["messages"][4]["content"]


def test_cut_reply_is_a_mistake_of_the_policy(service, data, tmp_path):
    cut = say("I think", call("move", '{"dire'), finish_reason="length")
    options = ["--max-episodes", "1", "--on-parse-error", "terminate"]
    _, _, episodes, _ = evaluate(service, data, tmp_path, lambda body: cut, *options)
    assert (episodes[0].end_reason, episodes[0].episode_return) == ("reply_cut", -0.5)
    assert service.episodes[0].actions == []


def test_reply_without_a_call_is_a_message(service, data, tmp_path):
    evaluate(service, data, tmp_path, lambda body: say("I give up."), "--max-episodes", "1")
    assert service.episodes[0].actions[0] == {"role": "assistant", "content": "I give up.", "tool_calls": []}


def test_failure_in_passing_is_tried_again(service, data, tmp_path):
    statuses = iter([MOVE, 503, 429])
    status, results, _, _ = evaluate(service, data, tmp_path, lambda body: next(statuses, MOVE))
    assert (status, results["all"]["num_failed"]) == (0, 0)


def test_failing_episodes_are_not_scored(service, data, tmp_path, capsys):
    calls = iter([MOVE])
    options = ["--max-episodes", "1", "--max-episode-restarts", "0"]
    status, results, episodes, _ = evaluate(service, data, tmp_path, lambda body: next(calls, 422), *options)
    assert status == 1
    assert (results["game"]["num_failed"], results["game"]["success_rate"]) == (1, None)
    assert "422" in episodes[0].failure
    assert "1 failed" in capsys.readouterr().out


def test_endpoint_that_refuses_is_said_before_any_episode(service, data, tmp_path, capsys):
    status, _, episodes, _ = evaluate(service, data, tmp_path, lambda body: 401)
    assert (status, episodes) == (1, [])
    assert "401" in capsys.readouterr().err
    assert service.episodes == []


def test_service_that_is_down_is_said_before_any_episode(data, tmp_path, capsys):
    with MockEnvServer() as service:
        url = service.url
    with ChatServer(lambda body: MOVE) as endpoint:
        arguments = ["--data", str(data), "--env-url", url, "--base-url", endpoint.base_url, "--model", "m"]
        assert main(arguments) == 1
    assert endpoint.headers == []
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--extra", "[]"], "--extra"),
        (["--base-url", "localhost"], "base URL"),
        (["--concurrency", "0"], "--concurrency"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--max-turn", "0"], "max_turn"),
    ],
    ids=["extra", "base url", "concurrency", "data", "max turn"],
)
def test_wrong_arguments_are_named(data, capsys, options, text):
    assert main(["--data", str(data), "--base-url", "http://127.0.0.1:9/v1", "--model", "m", *options]) == 2
    assert text in capsys.readouterr().err
