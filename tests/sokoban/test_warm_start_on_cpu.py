# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The tiny policy: how episodes are demonstrated and rendered, and that the same inputs give the same weights, once."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sokoban import curate_data, warm_start
from examples.sokoban.warm_start import WarmStartConfig
from recipe.agent_env.agent_dataset import AgentDataset

SMALL = WarmStartConfig(num_episodes=16, num_epochs=2, batch_size=4, hidden_size=64, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = curate_data.CurationConfig(num_train=16, num_test=0, dim=(6, 6), max_steps=8, max_solution=6)
    path = tmp_path_factory.mktemp("rooms") / "train.parquet"
    curate_data.write_parquet(curate_data.to_rows(curate_data.curate(config, 1, show_progress=False), config), path)
    return path


@pytest.fixture(scope="module")
def demonstrations(train_file: Path) -> list[warm_start.Demonstration]:
    dataset = AgentDataset(str(train_file))
    rng = random.Random(0)
    return [warm_start.demonstrate(dataset.spec(i), 0.3, rng) for i in range(len(dataset))]


@pytest.fixture(scope="module")
def policy(train_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    warm_start.warm_start(folder, train_file, SMALL, show_progress=False)
    return folder


def test_demonstrator_without_errors_solves_every_room_in_the_fewest_actions(train_file: Path) -> None:
    dataset = AgentDataset(str(train_file))
    for i in range(len(dataset)):
        demonstration = warm_start.demonstrate(dataset.spec(i), 0.0, random.Random(0))
        assert demonstration.is_solved
        assert len(demonstration.actions) == len(demonstration.observations) == dataset[i]["solution_length"]


def test_demonstrator_errs_as_often_as_asked(train_file: Path) -> None:
    dataset = AgentDataset(str(train_file))
    clumsy = [warm_start.demonstrate(dataset.spec(i), 1.0, random.Random(i)) for i in range(len(dataset))]
    assert sum(demonstration.is_solved for demonstration in clumsy) < len(clumsy) / 2


def test_rendering_equals_the_chat_template(demonstrations: list[warm_start.Demonstration]) -> None:
    """Turn by turn through the product's path gives what the template writes for the whole conversation."""
    tokenizer = warm_start.build_tokenizer(demonstrations, 1024)
    episode_tokenizer = warm_start.make_episode_tokenizer(tokenizer)
    for shown in demonstrations[:4]:
        messages = [{"role": "system", "content": shown.task_prompt}]
        for observation, action in zip(shown.observations, shown.actions, strict=True):
            call = {"type": "function", "function": {"name": action, "arguments": {}}}
            messages += [*observation, {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = tokenizer.apply_chat_template(messages, tools=shown.tools_schema, tokenize=False)
        episode = warm_start.render(shown, episode_tokenizer)
        assert tokenizer.decode(episode.prompt_ids + episode.response_ids) + "\n" == text


def test_mask_covers_the_calls_and_their_end_and_nothing_else(demonstrations: list[warm_start.Demonstration]) -> None:
    tokenizer = warm_start.build_tokenizer(demonstrations, 1024)
    shown = demonstrations[0]
    episode = warm_start.render(shown, warm_start.make_episode_tokenizer(tokenizer))
    marked = [i for i, mark in zip(episode.response_ids, episode.response_mask, strict=True) if mark]
    assert tokenizer.decode(marked) == "".join(map(warm_start.reply_text, shown.actions))


def test_vocabulary_makes_a_call_and_a_row_of_a_map_one_token(
    demonstrations: list[warm_start.Demonstration],
) -> None:
    tokenizer = warm_start.build_tokenizer(demonstrations, 2048)
    # <tool_call>, line break, the call with its line break, </tool_call>, <|im_end|>
    used = {action for demonstration in demonstrations for action in demonstration.actions}
    assert {len(tokenizer(warm_start.reply_text(action))["input_ids"]) for action in used} == {5}
    room = demonstrations[0].observations[0][0]["content"]
    assert len(tokenizer(f"{room}\n")["input_ids"]) == 6


def test_folder_loads_with_transformers(policy: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(policy),
        AutoTokenizer.from_pretrained(policy / warm_start.TOKENIZER_FOLDER),
    )
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.vocab_size == len(tokenizer)
    # The saved cutting rule is the one that is loaded.
    assert len(tokenizer(warm_start.reply_text(warm_start.ACTIONS[0]))["input_ids"]) == 5
    record = json.loads((policy / warm_start.RECORD_FILE).read_text())
    assert record["last_loss"] < record["first_loss"]


def test_second_call_takes_the_cached_policy(policy: Path, train_file: Path) -> None:
    before = (policy / "model.safetensors").stat().st_mtime_ns
    assert warm_start.warm_start(policy, train_file, SMALL, show_progress=False)["was_cached"]
    assert (policy / "model.safetensors").stat().st_mtime_ns == before


def test_same_inputs_give_the_same_weights_and_another_seed_others(
    policy: Path, train_file: Path, tmp_path: Path
) -> None:
    weights = {"first": AutoModelForCausalLM.from_pretrained(policy).state_dict()}
    for name, config in (("again", SMALL), ("other", replace(SMALL, seed=1))):
        warm_start.warm_start(tmp_path / name, train_file, config, show_progress=False)
        weights[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
    assert all(torch.equal(weights["first"][key], weights["again"][key]) for key in weights["first"])
    assert not all(torch.equal(weights["first"][key], weights["other"][key]) for key in weights["first"])


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"error_rate": 0.2}, {"num_episodes": 8}], ids=lambda c: next(iter(c))
)
def test_fingerprint_follows_every_input(train_file: Path, changed: dict) -> None:
    dataset = AgentDataset(str(train_file))
    specs = [dataset.spec(i) for i in range(4)]
    assert warm_start.fingerprint(SMALL, specs) != warm_start.fingerprint(replace(SMALL, **changed), specs)
    assert warm_start.fingerprint(SMALL, specs) != warm_start.fingerprint(SMALL, specs[:3])
    assert warm_start.fingerprint(SMALL, specs) == warm_start.fingerprint(replace(SMALL), list(specs))
