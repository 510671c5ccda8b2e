# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The meeting point with verl's agent loop: what the engine is asked, who plays which row, when a batch is refused."""

import asyncio
import dataclasses
import inspect
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.replica import TokenOutput
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from recipe.agent_env.agent_dataset import PromptTooLongError
from recipe.agent_env.progress_display import WORKER_NAME
from recipe.agent_env.prompt_styles import get_prompt_style
from recipe.agent_env.prompt_styles.qwen2_5 import Qwen25Style
from recipe.agent_env.rollout.agent_loop import (
    EngineSampler,
    EnvAgentLoopManager,
    EnvAgentLoopWorker,
    TooManyFailedEpisodesError,
    _rollout_indices,
    _rows_to_play,
)
from recipe.agent_env.rollout.episode import EndReason, EngineError, EngineLostError
from recipe.agent_env.rollout.progress import RolloutProgress
from tests.prompt_styles.tokenizers import qwen2_5_tokenizer, small_tokenizer, template
from tests.rollout.episodes import make_episode
from tests.rollout.scripted_policy import decode, encode


class FakeClient:
    """Stands in for verl's LLMServerClient; answers what it is told."""

    def __init__(self, answer):
        self._answer = answer
        self.requests: list[dict] = []

    async def generate(self, **request):
        self.requests.append(request)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def make_sampler(answer, style=None, seed_key=None) -> tuple[EngineSampler, FakeClient]:
    client = FakeClient(answer)
    style = style or SimpleNamespace(stop_token_ids=[9], stop=[])
    options = {"style": style, "priority": 3, "progress": RolloutProgress(), "seed_key": seed_key}
    return EngineSampler(client, {"temperature": 0.5}, **options), client


async def test_engine_is_asked_with_ids_and_answers_with_ids():
    """P8: ids are the truth; whatever text an engine may hold beside them is never read."""
    answer = TokenOutput(
        token_ids=[5, 9], log_probs=[-0.1, -0.2], extra_fields={"num_cached_tokens": 2, "text": "other"}
    )
    sampler, client = make_sampler(answer)
    reply = await sampler([1, 2, 3], 16, 0)
    await sampler([1, 2, 3, 5, 9, 4], 16, 1)
    assert (reply.ids, reply.log_probs, reply.num_cached_tokens) == ([5, 9], [-0.1, -0.2], 2)
    assert client.requests[0]["prompt_ids"] == [1, 2, 3]
    assert client.requests[0]["sampling_params"] == {"temperature": 0.5, "stop_token_ids": [9], "max_tokens": 16}
    assert client.requests[0]["request_id"] == client.requests[1]["request_id"], "turns stay on one replica"


async def test_engine_ends_a_turn_where_the_style_says():
    """gpt-oss: `<|end|>` closes a message of the turn, not the turn, so the engine must write on behind it."""
    special = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"]
    tokenizer = small_tokenizer(special, eos_token="<|return|>", chat_template=template("harmony"))
    style = get_prompt_style("chat_template")(tokenizer, tool_parser="gpt-oss")
    sampler, client = make_sampler(TokenOutput(token_ids=[5]), style)
    await sampler([1], 8, 0)
    stop_token_ids = client.requests[0]["sampling_params"]["stop_token_ids"]
    assert stop_token_ids == tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    assert tokenizer.convert_tokens_to_ids("<|end|>") in style.end_of_turn_ids


class VllmClient:
    """Decodes told ids one by one with vLLM's own parameters and detokenizer, as verl's vLLM server would ask it to."""

    def __init__(self, tokenizer, would_sample: list[int]):
        self._tokenizer = tokenizer
        self._would_sample = would_sample

    async def generate(self, *, request_id, prompt_ids, sampling_params, priority):
        params = SamplingParams(**sampling_params)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        for token_id in self._would_sample[: params.max_tokens]:
            ends = token_id in params.stop_token_ids
            if detokenizer.update([token_id], ends) is not None or ends:
                break
        return TokenOutput(token_ids=list(detokenizer.output_token_ids), stop_reason="completed")


@pytest.mark.parametrize("stop", ["</action>", "<|vision_end|>"], ids=["text", "special-token"])
async def test_vllm_ends_a_turn_at_a_stop_string(stop):
    """P15: up to the token that completes the string, all of it kept; a special token is found by its name too."""
    would_sample = encode(f"go <action>up{stop} and on and on<|im_end|>")
    style = Qwen25Style(qwen2_5_tokenizer(), stop=[stop])
    sampler = EngineSampler(
        VllmClient(style.tokenizer, would_sample), {}, style=style, priority=0, progress=RolloutProgress()
    )
    reply = await sampler(encode("<|im_start|>assistant\n"), 64, 0)
    assert reply.ids == would_sample[: len(reply.ids)]
    assert stop in decode(reply.ids) and stop not in decode(reply.ids[:-1])
    assert style.is_reply_complete(reply.ids) and not style.is_turn_closed(reply.ids)


async def asked_seeds(key, num_turns: int = 3) -> list[int | None]:
    sampler, client = make_sampler(TokenOutput(token_ids=[5, 9]), seed_key=key)
    for turn in range(num_turns):
        await sampler([1, 2, 3], 16, turn)
    return [request["sampling_params"].get("seed") for request in client.requests]


async def test_seeds_are_the_same_again_and_differ_by_row_rollout_and_turn():
    """One seed for all requests, as verl sends, would make the rollouts of a group copies of each other."""
    keys = [(42, 0, step, row, rollout) for step in (1, 2) for row in (0, 7) for rollout in range(4)]
    seeds = [seed for key in keys for seed in await asked_seeds(key)]
    assert seeds == [seed for key in keys for seed in await asked_seeds(key)]
    assert len(set(seeds)) == len(keys) * 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert await asked_seeds(None) == [None] * 3


@pytest.mark.parametrize("full_determinism", [True, False])
def test_requests_are_seeded_only_where_the_run_asks_for_it(full_determinism):
    worker = EnvAgentLoopWorker.__new__(EnvAgentLoopWorker)
    worker.rollout_config = SimpleNamespace(full_determinism=full_determinism, seed=42)
    key = worker._seed_key({"step": 3, "validate": False}, {"index": 5, "rollout_index": 1})
    assert key == ((42, 0, 3, 5, 1) if full_determinism else None)


async def test_request_ids_of_a_seeded_run_are_its_own_too():
    """verl picks a replica by the request's id."""
    (one, client), (two, other) = (make_sampler(TokenOutput(token_ids=[9]), seed_key=(42, 0, 1, 5, k)) for k in (0, 1))
    await one([1], 8, 0)
    await two([1], 8, 0)
    assert client.requests[0]["request_id"] == "det-42-0-1-5-0" != other.requests[0]["request_id"]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (TokenOutput(token_ids=[], stop_reason="aborted"), "aborted the request of turn 2"),
        (ValueError("no room"), "failed on turn 2: ValueError: no room"),
    ],
    ids=["aborted", "raised"],
)
async def test_engine_fault_is_named(answer, match):
    sampler, _ = make_sampler(answer)
    with pytest.raises(EngineError, match=match):
        await sampler([1], 8, 1)


class EngineDeadError(Exception):
    """Named like vLLM's."""


def as_ray_raises_it(cause: Exception) -> Exception:
    """An exception of a remote call, as the caller meets it."""
    return ray.exceptions.RayTaskError("generate", "Traceback ...", cause).as_instanceof_cause()


@pytest.mark.parametrize(
    "error",
    [ray.exceptions.RayActorError(), as_ray_raises_it(EngineDeadError("EngineCore encountered an issue."))],
    ids=["actor", "process"],
)
async def test_dead_engine_ends_the_run_with_its_own_error(error):
    """The actor is gone, or it lives and vLLM's process behind it does not."""
    sampler, _ = make_sampler(error)
    with pytest.raises(EngineLostError, match="an inference engine is gone, on turn 1"):
        await sampler([1], 8, 0)


def test_repetitions_are_counted_over_the_whole_batch():
    assert _rollout_indices(np.array([4, 4, 7, 4])).tolist() == [0, 1, 0, 2]


def test_padding_copies_of_validation_are_not_played_again():
    """verl fills a validation batch up with copies of its first rows; each takes its original's episode."""
    rows = np.array([0, 0, 1, 1, 0, 0])
    played, source = _rows_to_play(rows, _rollout_indices(rows), num_repeats=2)
    assert played.tolist() == [0, 1, 2, 3]
    assert source == [0, 1, 2, 3, 0, 1]


class FakeWorker:
    """Plays a row by naming it: the first prompt token is the row's number."""

    def __init__(self, episode_of):
        self._episode_of = episode_of
        self.generate_sequences = SimpleNamespace(remote=self._generate)
        self.num_rows: list[int] = []

    async def _generate(self, batch: DataProto):
        self.num_rows.append(len(batch))
        return [self._episode_of(int(index)) for index in batch.non_tensor_batch["index"]]


def make_manager(num_workers: int, episode_of=None, max_failed_fraction: float = 0.5) -> EnvAgentLoopManager:
    manager = EnvAgentLoopManager.__new__(EnvAgentLoopManager)
    manager.config = OmegaConf.create(
        {
            "env": {"max_failed_fraction": max_failed_fraction, "reseed_each_epoch": False},
            "data": {"max_prompt_length": 8, "seed": 1},
            "trainer": {"validation_data_dir": None},
            "algorithm": {"filter_groups": {"enable": False, "metric": "reward", "max_num_gen_batches": 3}},
        }
    )
    manager.rollout_config = OmegaConf.create({"n": 2, "val_kwargs": {"n": 1}})
    manager.services, manager.known_services, manager.train_dataset = set(), frozenset(), None
    manager.steps_per_epoch = 4
    manager.agent_loop_workers = [
        FakeWorker(episode_of or (lambda row: make_episode(prompt_ids=[100 + row]))) for _ in range(num_workers)
    ]
    manager.pad_token_id = 0
    return manager


def make_prompts(num_rows: int, *, validate: bool = False) -> DataProto:
    columns = {"index": np.arange(num_rows), "env_name": np.array(["game"] * num_rows, dtype=object)}
    prompts = DataProto.from_dict(tensors={"dummy_tensor": torch.zeros(num_rows, 1)}, non_tensors=columns)
    prompts.meta_info["validate"] = validate
    return prompts


@pytest.mark.parametrize(("num_rows", "num_workers"), [(7, 4), (1, 8), (3, 2), (8, 4)])
async def test_any_number_of_rows_on_any_number_of_workers(num_rows, num_workers):
    """P38: every row once, in order, spread as evenly as can be."""
    manager = make_manager(num_workers)
    output = await manager.generate_sequences(make_prompts(num_rows))
    assert output.batch["prompts"][:, -1].tolist() == [100 + row for row in range(num_rows)]
    shares = [sum(worker.num_rows) for worker in manager.agent_loop_workers]
    assert sum(shares) == num_rows and max(shares) - min(shares) <= 1
    assert output.meta_info["timing"]["agent_loop/generate_sequences/mean"] == 0.0


def test_workers_have_the_name_by_which_the_progress_display_finds_them():
    assert f'name=f"{WORKER_NAME}{{i}}"' in inspect.getsource(EnvAgentLoopManager._init_agent_loop_workers)


async def test_each_rollout_is_summed_up_in_one_line(capsys):
    prompts = make_prompts(3)
    prompts.meta_info["global_steps"] = 12
    await make_manager(2).generate_sequences(prompts)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 12 rollout: 3 episodes in ") and line.endswith("; ended as 3 terminated")


def failing(num_failed: int):
    return lambda row: make_episode(end_reason=EndReason.FAILED if row < num_failed else EndReason.TERMINATED)


async def test_outage_stops_the_run_above_the_limit_and_warns_below(caplog):
    """P68, P81: trained on zeros by nobody."""
    with pytest.raises(TooManyFailedEpisodesError, match=r"3 of 4 episodes failed \(75%\).*made by hand.*0\.5"):
        await make_manager(2, failing(3)).generate_sequences(make_prompts(4))
    with caplog.at_level(logging.WARNING):
        output = await make_manager(2, failing(2)).generate_sequences(make_prompts(4))
    assert "2 of 4 episodes failed (50%)" in caplog.text
    assert output.non_tensor_batch["is_failed"].tolist() == [True, True, False, False]


class ClosingWorker:
    """Notes that it was closed, or is gone."""

    def __init__(self, error: Exception | None = None):
        self.close = SimpleNamespace(remote=self._close)
        self.is_closed = False
        self._error = error

    async def _close(self):
        if self._error is not None:
            raise self._error
        await asyncio.sleep(0.01)
        self.is_closed = True


async def test_worker_that_is_gone_does_not_keep_the_others_from_closing(caplog):
    """P71: what ended the run may be the death of one worker; its error must not be replaced by another one."""
    manager = make_manager(0)
    others = [ClosingWorker(), ClosingWorker()]
    manager.agent_loop_workers = [others[0], ClosingWorker(ray.exceptions.RayActorError()), others[1]]
    with caplog.at_level(logging.WARNING):
        await manager.close()
    assert [worker.is_closed for worker in others] == [True, True]
    assert "left its environments to the service's idle limit" in caplog.text


@pytest.mark.parametrize("limit_s", [None, 60.0])
async def test_batch_has_its_own_deadline(monkeypatch, limit_s):
    """P70: counted from the start of each batch, and handed to every episode of it."""
    deadlines = []

    async def play_episode(spec, *, deadline, **_):
        deadlines.append(deadline)
        return make_episode()

    async def play_one_row(worker, batch):
        row = {"env_name": "game", "seed": 0, "env_kwargs": {}, "priority": 0, "rollout_index": 0}
        where = {"step": 0, "sample_index": 0, "validate": False}
        return await worker._run_agent_loop({}, where, agent_name="env", trace=False, **row)

    monkeypatch.setattr("recipe.agent_env.rollout.agent_loop.play_episode", play_episode)
    monkeypatch.setattr(AgentLoopWorker, "generate_sequences", play_one_row)
    worker = EnvAgentLoopWorker.__new__(EnvAgentLoopWorker)
    worker.config = OmegaConf.create({"env": {"batch_timeout_s": limit_s}})
    worker._client, worker._rules, worker.llm_client = object(), object(), object()
    worker._episode_tokenizer = SimpleNamespace(style=SimpleNamespace(stop_token_ids=[9], stop=[]))
    worker._progress = RolloutProgress()
    worker._playing, worker._is_stopped = set(), False
    worker.rollout_config = SimpleNamespace(full_determinism=False)
    for now in (100.0, 500.0):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        await worker.generate_sequences([None])
        assert (worker._progress.num_rows, worker._progress.num_finished) == (1, 1)
    assert deadlines == ([None, None] if limit_s is None else [160.0, 560.0])


async def test_batch_without_one_fitting_prompt_stops_the_run():
    manager = make_manager(1, lambda row: make_episode(end_reason=EndReason.PROMPT_TOO_LONG))
    with pytest.raises(PromptTooLongError, match="none of the 2 first prompts.*data.max_prompt_length=8"):
        await manager.generate_sequences(make_prompts(2))


async def test_other_service_than_the_checkpoints_is_reported_once(caplog):
    """P95."""
    manager = make_manager(1, lambda row: dataclasses.replace(make_episode(), service="sokoban 2.0"))
    manager.known_services = frozenset({"sokoban 1.0"})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await manager.generate_sequences(make_prompts(2, validate=True))
    assert [r.getMessage() for r in caplog.records] == [
        "episodes are played on sokoban 2.0, but the checkpoint was made on sokoban 1.0: numbers may not be comparable"
    ]
    assert manager.services == {"sokoban 2.0"}


async def played_seeds(step: int, *, reseeds: bool = True, validate: bool = False) -> list[int]:
    """Seeds of 8 rows, each twice, at a step of epochs of four steps."""
    manager = make_manager(2)
    manager.config.env.reseed_each_epoch = reseeds
    manager.rollout_config.val_kwargs.n = 2
    prompts = make_prompts(8, validate=validate)
    prompts.non_tensor_batch["seed"] = np.array([*range(7), -1], dtype=object)
    prompts.meta_info["global_steps"] = step
    output = await manager.generate_sequences(prompts.repeat(2, interleave=True))
    assert output.non_tensor_batch["seed"][::2].tolist() == output.non_tensor_batch["seed"][1::2].tolist()
    return output.non_tensor_batch["seed"][::2].tolist()


async def test_seeds_of_the_data_are_new_in_each_epoch_where_asked_for():
    """P91: equal inside a group, the same again after a resume, never in validation; off by default."""
    own = [*range(7), -1]
    assert await played_seeds(4) == await played_seeds(9, reseeds=False) == await played_seeds(9, validate=True) == own
    second, third = await played_seeds(5), await played_seeds(9)
    assert len({*own, *second, *third}) == 24
    assert await played_seeds(8) == second
