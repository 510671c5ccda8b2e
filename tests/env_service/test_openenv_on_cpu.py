# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The adapter in front of a real OpenEnv server: its environments are played through our protocol."""

import time

import pytest

from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from recipe.agent_env.env_service.openenv_adapter import action_parameters, observation_text, serve_openenv
from recipe.agent_env.rollout.episode import EndReason, play_episode
from tests.env_service.openenv_server import GUESS, TALK, TOOLS, GuessEnvironment, openenv_server
from tests.env_service.service import call, say, serve, serve_process
from tests.rollout.scripted_policy import ScriptedPolicy, make_rules, make_spec, make_tokenizer


@pytest.fixture(scope="module")
def guess_url():
    with openenv_server(GUESS) as url:
        yield url


@pytest.fixture(scope="module")
def service(guess_url):
    with serve({"guess": serve_openenv(guess_url)}) as running:
        yield running


def guess(number):
    return call("act", {"number": number})


def test_action_record_becomes_the_arguments_of_one_tool(service):
    env_id = service.open("guess", seed=3)
    [tool] = service.get(env_id, "tools-schema-openai").json()["tools_schema"]
    assert tool["function"]["name"] == "act" and tool["function"]["description"] == "Name a number."
    parameters = tool["function"]["parameters"]
    assert list(parameters["properties"]) == ["number", "on"] and parameters["required"] == ["number"]
    assert service.get(env_id, "task-prompt").json()["task_prompt"] == "GuessEnvironment environment"
    service.close(env_id)


def test_episode_is_played_with_the_servers_rewards_and_end(service):
    answer = service.initialize("guess", seed=3, high=10).json()
    assert answer["observation"] == [{"role": "user", "content": "Guess a number below 10."}]
    assert answer["capabilities"]["version"] == "1.0.0"
    wrong = service.step(answer["env_id"], guess(4)).json()
    assert wrong["observation"][0]["content"] == "No." and wrong["observation"][0]["role"] == "tool"
    assert (wrong["reward"], wrong["done"], wrong["info"]) == (0.0, False, {"won": False, "num_guesses": 1})
    right = service.step(answer["env_id"], guess(3)).json()
    assert (right["reward"], right["done"], right["truncated"]) == (1.0, True, False)
    assert right["info"] == {"won": True, "num_guesses": 2}
    service.close(answer["env_id"])


def test_same_seed_gives_the_same_episode_and_reset_starts_anew(service):
    env_id = service.open("guess", seed=5)
    assert service.step(env_id, guess(5)).json()["done"] is True
    again = service.post(env_id, "reset", json={"seed": 6, "options": {"high": 7}}).json()
    assert again["observation"][0]["content"] == "Guess a number below 7."
    assert service.step(env_id, guess(6)).json()["done"] is True
    service.close(env_id)


def test_action_that_the_server_refuses_is_an_observation(service):
    """A rule that the schema does not tell is broken by the policy, not by the environment."""
    env_id = service.open("guess", seed=3)
    answer = service.step(env_id, call("act", {"number": 3, "on": "someday"})).json()
    assert answer["observation"][0]["content"].startswith("Invalid action: on: Input should be a valid date")
    assert (answer["reward"], answer["done"]) == (0.0, False)
    assert service.step(env_id, guess(3)).json()["done"] is True
    service.close(env_id)


def test_turn_without_a_call_steps_nothing(service):
    env_id = service.open("guess", seed=3)
    assert service.step(env_id, say("three")).json()["observation"] == [
        {"role": "user", "content": "Call one of the tools."}
    ]
    assert service.step(env_id, guess(3)).json()["info"]["num_guesses"] == 1
    service.close(env_id)


def test_crash_there_is_a_lost_session_here(service):
    """P68, P82: an exception of the environment is no observation and no reward."""
    env_id = service.open("guess", seed=3)
    crashed = service.step(env_id, guess(-1))
    assert crashed.status_code == 500 and crashed.json()["error"] == "environment_crashed"
    assert service.step(env_id, guess(3)).status_code == 410


def test_options_that_its_reset_does_not_survive_open_nothing(service):
    live = service.stats()["live_sessions"]
    assert service.initialize("guess", seed=3, high=0).status_code == 500
    assert service.initialize("guess", seed=3, high="many").status_code in (422, 500)
    assert service.stats()["live_sessions"] == live


def test_closed_session_is_closed_there(service):
    before = GuessEnvironment.num_closed
    service.close(service.open("guess", seed=3))
    deadline = time.monotonic() + 30
    while GuessEnvironment.num_closed == before:
        assert time.monotonic() < deadline, "the OpenEnv session stayed open"
        time.sleep(0.02)


def test_full_server_is_a_503_that_the_client_waits_for():
    with openenv_server(GUESS, max_sessions=1) as url, serve({"guess": serve_openenv(url)}) as service:
        env_id = service.open("guess", seed=1)
        full = service.initialize("guess", seed=2)
        assert full.status_code == 503 and full.headers["Retry-After"] == "1"
        assert full.json()["error"] == "at_capacity"
        service.close(env_id)
        deadline = time.monotonic() + 30
        while service.initialize("guess", seed=2).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert service.stats()["crashed"] == 0


def test_server_that_goes_away_loses_sessions_and_opens_none():
    with openenv_server(GUESS) as url:
        with serve({"guess": serve_openenv(url)}) as service:
            env_id = service.open("guess", seed=1)
            with openenv_server(GUESS):
                pass  # another one: the first goes on
            assert service.step(env_id, guess(2)).status_code == 200
    with serve({"guess": serve_openenv(url)}) as service:
        assert service.initialize("guess", seed=1).status_code == 500


def test_hang_up_in_mid_episode_loses_the_session():
    with openenv_server(GUESS) as url:
        context = serve({"guess": serve_openenv(url)})
        service = context.__enter__()
        env_id = service.open("guess", seed=1)
    try:
        assert service.step(env_id, guess(2)).status_code == 500
        assert service.step(env_id, guess(2)).status_code == 410
    finally:
        context.__exit__(None, None, None)


def test_session_outlives_a_long_generation():
    """P78: the server pings every 0.2 s and hangs up when nobody answers for 0.4 s; the model thinks for 2 s."""
    with openenv_server(GUESS, ws_ping_interval=0.2, ws_ping_timeout=0.4) as url:
        with serve({"guess": serve_openenv(url)}) as service:
            env_id = service.open("guess", seed=1)
            time.sleep(2)
            assert service.step(env_id, guess(1)).json()["done"] is True
            service.close(env_id)


def test_tools_of_the_model_context_protocol_keep_their_names():
    with openenv_server(TOOLS) as url, serve({"tools": serve_openenv(url, task_prompt="Add.")}) as service:
        answer = service.initialize("tools", seed=1).json()
        env_id = answer["env_id"]
        assert answer["observation"] == []
        assert service.get(env_id, "task-prompt").json()["task_prompt"] == "Add."
        tools = service.get(env_id, "tools-schema-openai").json()["tools_schema"]
        assert [tool["function"]["name"] for tool in tools] == ["add", "fail"]
        assert tools[0]["function"]["description"] == "Add two numbers."
        assert service.step(env_id, call("add", {"a": 1, "b": 2})).json()["observation"][0]["content"] == "3"
        assert service.step(env_id, call("add", {"a": "one", "b": 2})).status_code == 422
        failed = service.step(env_id, call("fail", {"text": "never"})).json()
        assert "never" in failed["observation"][0]["content"] and failed["done"] is False
        service.close(env_id)


def test_plain_text_goes_into_the_field_that_was_named():
    factory_options = {"text_field": "message", "observation_field": "heard"}
    with openenv_server(TALK) as url, serve({"talk": serve_openenv(url, **factory_options)}) as service:
        env_id = service.open("talk", seed=1)
        assert service.get(env_id, "tools-schema-openai").json()["tools_schema"] == []
        answer = service.step(env_id, say("hello there")).json()
        assert answer["observation"] == [{"role": "user", "content": "hello there"}] and answer["reward"] == 1.0
        service.close(env_id)


def test_field_that_is_not_there_is_named():
    with openenv_server(TALK) as url, serve({"talk": serve_openenv(url, observation_field="smelt")}) as service:
        answer = service.initialize("talk", seed=1)
        assert answer.status_code == 500 and "smelt" in answer.json()["message"]


def test_command_line_serves_an_openenv_server_in_worker_processes(guess_url):
    with serve_process("--openenv", f"guess-v0={guess_url}", "--workers", "2") as process:
        assert "guess-v0" in process.first_line
        env_id = process.service.open("guess-v0", seed=4, high=9)
        assert process.service.step(env_id, guess(4)).json()["reward"] == 1.0
        process.service.close(env_id)


async def test_trainings_own_episode_loop_plays_it(service):
    """Success comes from a flag of the OpenEnv observation."""
    replies = [
        f'<tool_call>\n{{"name": "act", "arguments": {{"number": {n}}}}}\n</tool_call><|im_end|>' for n in (1, 3)
    ]
    policy = ScriptedPolicy(replies)
    async with AsyncEnvClient(EnvClientConfig(endpoint=service.url)) as client:
        episode = await play_episode(
            make_spec(3, "guess", high=10),
            client=client,
            tokenizer=make_tokenizer(),
            sample=policy,
            rules=make_rules(success_key="won"),
        )
    assert episode.end_reason is EndReason.TERMINATED
    assert (episode.episode_return, episode.success, episode.num_assistant_turns) == (1.0, 1.0, 2)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ({"hint": "No.", "won": False, "count": 2}, "No."),
        ({"a": "one", "b": "two"}, '{"a": "one", "b": "two"}'),
        ({"board": [[1, 0]], "note": "é"}, '{"board": [[1, 0]], "note": "é"}'),
        ({"x": 1}, '{"x": 1}'),
        ({"tool_name": "t", "result": {"content": [{"type": "text", "text": "3"}]}, "error": None}, "3"),
        ({"tool_name": "t", "result": [1, 2], "error": None}, "[1, 2]"),
        ({"tool_name": "t", "result": None, "error": {"message": "no such tool"}}, "no such tool"),
    ],
    ids=["one text", "two texts", "structure", "number", "tool", "tool with data", "tool error"],
)
def test_what_the_policy_reads(observation, text):
    assert observation_text(observation) == text


def test_parameters_keep_definitions_and_leave_out_metadata():
    schema = {
        "properties": {"metadata": {"type": "object"}, "move": {"$ref": "#/$defs/Move"}},
        "$defs": {"Move": {"enum": ["up", "down"]}},
        "required": ["move"],
        "title": "MoveAction",
        "additionalProperties": False,
    }
    assert action_parameters(schema) == {
        "type": "object",
        "properties": {"move": {"$ref": "#/$defs/Move"}},
        "$defs": {"Move": {"enum": ["up", "down"]}},
        "required": ["move"],
        "additionalProperties": False,
    }


def test_url_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="ws://here"):
        serve_openenv("ws://here")
