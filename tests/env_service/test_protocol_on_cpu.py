# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Every call of the protocol against the real service over loopback."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from tests.env_service.service import Service, call, say, serve
from tests.env_service.toy_envs import AsyncEnv, EchoEnv, ParallelEnv, PlainEnv, SolvedEnv


def raw_call(type: str = "function", arguments: Any = "{}") -> dict[str, Any]:
    """An action with one call that is malformed on request."""
    function = {"name": "say", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": type, "function": function}]}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    environments = {
        "echo": EchoEnv,
        "plain": PlainEnv,
        "parallel": ParallelEnv,
        "async": AsyncEnv,
        "solved": SolvedEnv,
    }
    with serve(environments) as running:
        yield running


def test_health_answers_without_a_session(service: Service):
    assert service.request("GET", "/").json()["status"] == "ok"


def test_initialize_answers_the_documented_fields(service: Service):
    answer = service.initialize("echo", seed=5).json()
    assert set(answer) == {"message", "env_id", "observation", "info", "done", "capabilities"}
    assert answer["observation"] == [{"role": "user", "content": "seed 5 options None"}]
    assert answer["done"] is False
    assert answer["capabilities"] == {
        "step_dedup": True,
        "keepalive": True,
        "idle_timeout_s": 600.0,
        "render": True,
        "name": "echo",
        "version": "7",
    }


def test_initialize_says_done_when_the_start_is_the_end(service: Service):
    answer = service.initialize("solved").json()
    assert answer["done"] is True
    assert service.step(answer["env_id"]).status_code == 409


def test_session_attributes_are_answered(service: Service):
    env_id = service.open("echo")
    assert service.get(env_id, "task-prompt").json() == {"task_prompt": "Say something."}
    assert service.get(env_id, "tools-schema-openai").json()["tools_schema"] == EchoEnv.tools_schema
    assert service.get(env_id, "allow-parallel-tool-call").json() == {"allow_parallel_tool_call": False}
    assert service.get(env_id, "render").json() == {"render": "<b>0</b>"}


def test_class_without_attributes_gets_defaults(service: Service):
    env_id = service.open("plain")
    assert service.get(env_id, "task-prompt").json() == {"task_prompt": ""}
    assert service.get(env_id, "tools-schema-openai").json() == {"tools_schema": []}
    assert service.get(env_id, "render").status_code == 404
    answer = service.step(env_id).json()
    assert (answer["reward"], answer["info"]) == (1.0, {})
    assert service.close(env_id).status_code == 200


def test_text_observation_answers_the_call(service: Service):
    env_id = service.open("echo")
    answer = service.step(env_id, call("say", {"text": "hi"}, "call_9")).json()
    assert answer["observation"] == [{"role": "tool", "tool_call_id": "call_9", "name": "say", "content": "1: hi"}]
    assert service.step(env_id, say("yes")).json()["observation"] == [{"role": "user", "content": "2: yes"}]


@pytest.mark.parametrize(
    "action",
    [{"role": "assistant", "content": "x"}, {"content": "x", "tool_calls": None}, {"tool_calls": []}],
    ids=["missing", "null", "no-content"],
)
def test_action_without_calls_is_taken(service: Service, action: dict):
    assert service.step(service.open("echo"), action).status_code == 200


def test_episode_end_is_final_until_reset(service: Service):
    env_id = service.open("echo", max_steps=1)
    assert service.step(env_id).json()["done"] is True
    refused = service.step(env_id)
    assert (refused.status_code, refused.json()["error"]) == (409, "episode_over")
    again = service.post(env_id, "reset", json={"seed": 3, "options": {"a": 1}})
    assert again.json() == {
        "observation": [{"role": "user", "content": "seed 3 options {'a': 1}"}],
        "info": {"seed": 3},
        "done": False,
    }
    assert service.step(env_id, index=0).status_code == 200


def test_parallel_calls_need_permission(service: Service):
    two = {**say(""), "tool_calls": [call("a")["tool_calls"][0], call("b", call_id="call_1")["tool_calls"][0]]}
    answer = service.step(service.open("parallel"), two).json()
    assert [message["content"] for message in answer["observation"]] == ["did a", "did b"]
    two["tool_calls"] = [call("wait")["tool_calls"][0]] * 2
    refused = service.step(service.open("echo"), two)
    assert (refused.status_code, refused.json()["error"]) == (422, "parallel_tool_calls")


def test_async_environment_runs_on_the_loop_and_is_closed(service: Service):
    env_id = service.open("async")
    answer = service.step(env_id).json()
    assert (answer["reward"], answer["truncated"]) == (0.25, True)
    assert not answer["info"]["thread"].startswith("env-")
    before = AsyncEnv.num_closed
    service.close(env_id)
    assert AsyncEnv.num_closed == before + 1


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (call("fly"), "unknown_tool"),
        (call("say", {"text": 3}), "bad_tool_arguments"),
        (call("say", {}), "bad_tool_arguments"),
        (raw_call(arguments="{"), "bad_tool_arguments"),
        (raw_call(arguments="[]"), "bad_tool_arguments"),
        (raw_call(arguments={}), "bad_request"),
        (raw_call(type="x"), "bad_request"),
        ({"role": "user", "content": "x"}, "bad_request"),
    ],
    ids=["unknown", "ill-typed", "missing", "not-json", "no-object", "not-text", "no-function", "not-assistant"],
)
def test_bad_call_is_refused_and_applies_nothing(service: Service, action: dict, kind: str):
    env_id = service.open("echo")
    refused = service.step(env_id, action, index=0)
    assert (refused.status_code, refused.json()["error"]) == (422, kind)
    assert service.step(env_id, say("a"), index=0).json()["observation"][0]["content"] == "1: a"


def test_unknown_environment_names_the_known_ones(service: Service):
    answer = service.initialize("sokobann")
    assert answer.status_code == 404
    assert answer.json()["known"] == ["async", "echo", "parallel", "plain", "solved"]


@pytest.mark.parametrize(
    ("env_kwargs", "kind"),
    [({"colour": 1}, "bad_env_kwargs"), ({"max_steps": 0}, "bad_options")],
    ids=["unknown-argument", "refused-value"],
)
def test_bad_env_kwargs_are_the_clients_fault(service: Service, env_kwargs: dict, kind: str):
    answer = service.initialize("echo", **env_kwargs)
    assert (answer.status_code, answer.json()["error"]) == (422, kind)
    assert next(iter(env_kwargs)) in answer.json()["message"]


def test_refused_reset_leaves_the_session_open(service: Service):
    env_id = service.open("echo")
    answer = service.post(env_id, "reset", json={"seed": 0, "options": {"refuse": 1}})
    assert (answer.status_code, answer.json()["error"]) == (422, "bad_options")
    assert service.step(env_id).status_code == 200


def test_unknown_and_closed_sessions_are_told_apart(service: Service):
    env_id = service.open("echo")
    assert service.close(env_id).status_code == 200
    assert service.close(env_id).status_code == 200
    assert (service.step(env_id).status_code, service.step("nobody").status_code) == (410, 404)


def test_keepalive_and_trailing_slash_of_the_base_url(service: Service):
    env_id = service.open("echo")
    assert service.post(env_id, "keepalive").status_code == 200
    assert service.request("GET", f"//api/environment/{env_id}/task-prompt").status_code == 200


def test_session_ids_cannot_be_guessed(service: Service):
    ids = {service.open("echo") for _ in range(20)}
    assert len(ids) == 20 and all(re.fullmatch(r"[\w-]{24}", env_id) for env_id in ids)


def test_openapi_documents_every_call(service: Service):
    paths = service.request("GET", "/openapi.json").json()["paths"]
    session = "/api/environment/{env_id}/"
    operations = ["reset", "step", "close", "keepalive", "task-prompt", "tools-schema-openai"]
    assert {"/api/environment/initialize", *(session + name for name in operations)} <= set(paths)
    step = paths[session + "step"]["post"]
    assert {parameter["name"] for parameter in step["parameters"]} == {"env_id", "X-Env-Step-Index"}
    assert "action" in step["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "/docs" in service.request("GET", "/docs").url


def test_stats_and_metrics_agree(service: Service):
    service.step(service.open("echo"))
    stats = service.stats()
    metrics = service.request("GET", "/metrics").text
    assert f"agent_env_steps_total {float(stats['steps'])}" in metrics
    assert f"agent_env_opened_total {float(stats['opened'])}" in metrics
    assert f'agent_env_live_sessions{{env_name="echo"}} {float(stats["live_by_name"]["echo"])}' in metrics
    assert stats["step_latency_ms"]["samples"] == stats["steps"]
    assert f"agent_env_step_seconds_count {float(stats['steps'])}" in metrics


async def test_our_client_plays_an_episode(service: Service):
    async with AsyncEnvClient(EnvClientConfig(endpoint=service.url)) as client:
        session = await client.open(env_name="echo", seed=1, env_kwargs={"max_steps": 2})
        assert session.capabilities.step_dedup and session.capabilities.version == "7"
        results = [await session.step(call("say", {"text": text})) for text in ("a", "b")]
        assert [result.observation[0]["content"] for result in results] == ["1: a", "2: b"]
        assert [result.terminated for result in results] == [False, True]
        await session.close()
