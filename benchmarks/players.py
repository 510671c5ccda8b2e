# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Ways to play one simulated workload: the product's, verl's own tool loop, and lock-step loops.

Owns who waits for whom. The delays come from `simulation`, where all players meet the same engine and service.
"""

import asyncio
import functools
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from benchmarks.simulation import (
    MOVE_TOOL,
    EpisodePlan,
    ReplyMaker,
    SimulatedEngine,
    SimulatedService,
    Workload,
    open_http,
)
from recipe.agent_env.agent_dataset import EpisodeSpec, EpisodeTokenizer
from recipe.agent_env.env_client import AsyncEnvClient, EnvClientConfig
from recipe.agent_env.prompt_styles.qwen2_5 import Qwen25Style
from recipe.agent_env.rollout.episode import EndReason, EpisodeRules, SampledReply, play_episode
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer

MAX_CONTEXT = 16384
Player = Callable[[Workload, SimulatedEngine, SimulatedService], Awaitable[None]]


def encode(text: str) -> list[int]:
    """Ids of a text with Qwen2.5's real vocabulary, control tokens matched."""
    return qwen2_5_tokenizer()(text, add_special_tokens=False)["input_ids"]


@functools.cache
def make_tokenizer() -> EpisodeTokenizer:
    """The product's way from chat to tokens; made once, as each worker makes it at its start."""
    return EpisodeTokenizer(
        Qwen25Style(qwen2_5_tokenizer()),
        max_prompt_length=MAX_CONTEXT,
        max_response_length=1024,
        truncation="error",
        max_observation_tokens=None,
    )


def make_rules(max_turn: int) -> EpisodeRules:
    """Rules with room for every simulated episode."""
    return EpisodeRules(
        max_prompt_length=MAX_CONTEXT,
        max_response_length=1024,
        max_turn=max_turn,
        tool_parsing_error_reward=-0.5,
        on_parse_error="feedback",
        success_key="success",
        success_on_termination=False,
        max_episode_restarts=0,
        episode_timeout_s=36000.0,
        overlong_reward=0.0,
        masked_end_reasons=frozenset(),
        bootstrap_on_truncation=False,
    )


# ---- ours ------------------------------------------------------------------------------------------------------------


async def play_ours(workload: Workload, engine: SimulatedEngine, service: SimulatedService) -> None:
    """`play_episode` with the real client, all episodes at once, as an agent worker does."""
    tokenizer, rules = make_tokenizer(), make_rules(max_turn=10_000)

    async def play(client: AsyncEnvClient, number: int, plan: EpisodePlan) -> None:
        async def sample(context_ids: list[int], max_tokens: int, turn: int) -> SampledReply:
            ids = await engine.reply(plan, turn)
            return SampledReply(ids=ids, log_probs=[-0.5] * len(ids))

        spec = EpisodeSpec(env_name="boxes", seed=number, env_kwargs={})
        episode = await play_episode(spec, client=client, tokenizer=tokenizer, sample=sample, rules=rules)
        assert episode.end_reason is EndReason.TERMINATED, episode.failure
        assert episode.num_assistant_turns == plan.num_turns

    num_episodes = len(workload.plans)
    config = EnvClientConfig(endpoint=service.url, max_concurrent_episodes=num_episodes, request_timeout_s=3600.0)
    async with AsyncEnvClient(config) as client:
        await asyncio.gather(*[play(client, number, plan) for number, plan in enumerate(workload.plans)])


# ---- a plain client for the others -----------------------------------------------------------------------------------


class PlainSession:
    """One environment through aiohttp and nothing else."""

    def __init__(self, http: aiohttp.ClientSession, url: str, number: int):
        self._http, self._root, self._number = http, f"{url}/api/environment", number
        self._env_id = ""
        self.task_prompt = ""
        self.observation: list[dict[str, Any]] = []

    async def open(self) -> None:
        """Initialize, and fetch what the first prompt needs."""
        start = {"env_name": "boxes", "seed": self._number, "env_kwargs": {}}
        reply = await self._call("POST", f"{self._root}/initialize", start)
        self._env_id, self.observation = reply["env_id"], reply["observation"]
        self.task_prompt = (await self._call("GET", f"{self._root}/{self._env_id}/task-prompt"))["task_prompt"]
        await self._call("GET", f"{self._root}/{self._env_id}/tools-schema-openai")

    async def step(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """One move."""
        function = {"name": "move", "arguments": json.dumps(arguments)}
        call = {"id": "call_0", "type": "function", "function": function}
        action = {"role": "assistant", "content": "", "tool_calls": [call]}
        return await self._call("POST", f"{self._root}/{self._env_id}/step", {"action": action})

    async def close(self) -> None:
        """End the environment."""
        await self._call("POST", f"{self._root}/{self._env_id}/close", {})

    async def _call(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async with self._http.request(method, url, json=body) as response:
            return json.loads(await response.read())


# ---- lock-step -------------------------------------------------------------------------------------------------------


def play_in_lock_step(*, one_by_one: bool) -> Player:
    """The whole batch turn by turn: generate for all, wait for the slowest, step all, wait for the slowest.

    Args:
        one_by_one: Environment calls follow each other, as a loop of blocking requests makes them; otherwise all of a
            turn run at once, as from a pool of threads.
    """

    async def play(workload: Workload, engine: SimulatedEngine, service: SimulatedService) -> None:
        tokenizer = make_tokenizer()
        async with open_http(len(workload.plans), limit_s=36000.0) as http:
            sessions = [PlainSession(http, service.url, number) for number in range(len(workload.plans))]
            await _all([session.open() for session in sessions], one_by_one)
            contexts = [tokenizer.first_prompt(s.task_prompt, s.observation, [MOVE_TOOL])[0] for s in sessions]
            active = list(range(len(sessions)))
            turn = 0
            while active:
                replies = await asyncio.gather(*[engine.reply(workload.plans[i], turn) for i in active])
                arguments = []
                for i, ids in zip(active, replies, strict=True):
                    contexts[i] = contexts[i] + ids
                    calls = tokenizer.style.parse_reply(ids, [MOVE_TOOL]).message["tool_calls"]
                    arguments.append(json.loads(calls[0]["function"]["arguments"]))
                steps = [sessions[i].step(moved) for i, moved in zip(active, arguments, strict=True)]
                answers = await _all(steps, one_by_one)
                for i, ids, answer in zip(active, replies, answers, strict=True):
                    contexts[i] = contexts[i] + tokenizer.observation_delta(answer["observation"], ids)[0]
                active = [i for i, answer in zip(active, answers, strict=True) if not answer["done"]]
                turn += 1
            await _all([session.close() for session in sessions], one_by_one)

    return play


async def _all(calls: list[Any], one_by_one: bool) -> list[Any]:
    return [await call for call in calls] if one_by_one else list(await asyncio.gather(*calls))


# ---- verl's tool loop ------------------------------------------------------------------------------------------------


async def play_with_verl_tools(workload: Workload, engine: SimulatedEngine, service: SimulatedService) -> None:
    """verl's `ToolAgentLoop`, one per row as verl's worker makes them, with the environment as a tool.

    A tool cannot end verl's loop and the loop starts from a finished prompt, so the row around it opens the
    environment, sets the number of turns, plays the last move (verl runs no tool after the last turn) and closes.
    """
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput

    class MoveTool(BaseTool):
        """The environment of the row that calls."""

        def __init__(self) -> None:
            schema = OpenAIFunctionToolSchema.model_validate(MOVE_TOOL)
            self.tool_schema, self.name = schema, schema.function.name
            self._sessions: dict[str, PlainSession] = {}

        async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
            created = await super().create(instance_id)
            self._sessions[created[0]] = kwargs["create_kwargs"]["session"]
            return created

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            answer = await self._sessions[instance_id].step(parameters)
            return ToolResponse(text=answer["observation"][0]["content"]), answer["reward"], {}

        async def release(self, instance_id: str, **kwargs: Any) -> None:
            del self._sessions[instance_id]

    class RowEngine:
        """verl's client to the inference servers, for one row."""

        def __init__(self, plan: EpisodePlan):
            self._plan, self._turn = plan, 0

        async def generate(self, **request: Any) -> TokenOutput:
            ids = await engine.reply(self._plan, self._turn)
            self._turn += 1
            return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids))

    def config_for(plan: EpisodePlan) -> Any:
        multi_turn = {
            "max_user_turns": None,
            "max_assistant_turns": plan.num_turns,
            "max_parallel_calls": 1,
            "max_tool_response_length": 4096,
            "tool_response_truncate_side": "middle",
            "format": "hermes",
        }
        rollout = {
            "multi_turn": multi_turn,
            "prompt_length": MAX_CONTEXT,
            "response_length": MAX_CONTEXT,
            "full_determinism": False,
        }
        return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})

    tools = ToolListWrap([MoveTool()])

    async def play(http: aiohttp.ClientSession, number: int, plan: EpisodePlan) -> None:
        session = PlainSession(http, service.url, number)
        await session.open()
        config = config_for(plan)
        loop = ToolAgentLoop(
            DictConfigWrap(config),
            RowEngine(plan),
            qwen2_5_tokenizer(),
            None,
            RLHFDataset,
            DictConfigWrap(config.data),
            hf_model_type="qwen2",
            tools=tools,
        )
        output = await loop.run(
            {"temperature": 1.0},
            raw_prompt=[{"role": "system", "content": session.task_prompt}, *session.observation],
            tools_kwargs={"move": {"create_kwargs": {"session": session}}},
        )
        assert output.num_turns == 2 * plan.num_turns, "one message of the user, then turns and answers but the last"
        await session.step({"direction": "up"})
        await session.close()

    async with open_http(len(workload.plans), limit_s=36000.0) as http:
        await asyncio.gather(*[play(http, number, plan) for number, plan in enumerate(workload.plans)])


async def play(player: Player, workload: Workload) -> None:
    """Play a whole workload on an engine and a service of its own."""
    async with SimulatedService(workload.plans) as service:
        await player(workload, SimulatedEngine(workload, ReplyMaker(encode)), service)


# Tokenizers may use threads of their own, whose time the skipping clock would count twice.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
