# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The doctor: what it finds, what it advises, how it exits; against a live loopback service."""

import io
import json
import random
import subprocess
import sys

import pytest
from rich.console import Console

from recipe.agent_env.check import load_config, main, run_checks
from recipe.agent_env.env_client import check_tool_calls
from recipe.agent_env.prompt_styles import get_prompt_style
from recipe.agent_env.tools.check_episode import encode_reply
from recipe.agent_env.tools.check_report import Report
from recipe.agent_env.tools.random_calls import random_action
from tests.mock_env_server import MOVE_TOOL, EnvScript, MockEnvServer, Step
from tests.prompt_styles.tokenizers import (
    QWEN_PLAIN,
    QWEN_SPECIAL,
    llama3_tokenizer,
    qwen2_5_tokenizer,
    qwen3_tokenizer,
    small_tokenizer,
    template,
)

SOLVED = Step(reward=1.0, done=True, info={"success": True})
GOOD = EnvScript(steps=[Step(reward=0.5), SOLVED])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer(
        QWEN_SPECIAL, QWEN_PLAIN, eos_token="<|im_end|>", chat_template=template("qwen2_5"), name_or_path="small"
    )
    tokenizer.save_pretrained(str(path))
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 8192}))
    return path


@pytest.fixture
def service():
    with MockEnvServer() as server:
        server.script("game", GOOD)
        yield server


@pytest.fixture
def rows(tmp_path):
    for split, seeds in (("train", range(4)), ("val", range(100, 102))):
        lines = [json.dumps({"env_name": "game", "seed": seed, "env_kwargs": {}}) for seed in seeds]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path


def good_arguments(service, rows, model_path):
    """A small set-up where everything is right, validation left out."""
    return [
        f"env.environment_endpoint={service.url}",
        "env.request_timeout_s=5",
        f"data.train_files={rows / 'train.jsonl'}",
        "data.train_batch_size=4",
        "data.max_response_length=64",
        f"actor_rollout_ref.model.path={model_path}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.logger=[console]",
    ]


@pytest.fixture(scope="module")
def base_config():
    """Composed once: Hydra takes most of the doctor's time."""
    return load_config([])


@pytest.fixture
def check(service, rows, model_path, base_config):
    """Runs the doctor on a set-up where everything is right, but for some overrides; gives status and text."""

    def run(*overrides, is_full=False):
        arguments = good_arguments(service, rows, model_path)
        arguments += [f"data.val_files={rows / 'val.jsonl'}", *overrides]
        config = base_config.copy()
        config.merge_with_dotlist(arguments)
        report = Report(Console(file=io.StringIO(), width=200))
        run_checks(config, arguments, report, num_rows=4, is_full=is_full)
        status = report.verdict()
        return status, " ".join(report.console.file.getvalue().split())

    return run


def test_good_set_up_is_ready(service, rows, model_path, capsys):
    status = main([*good_arguments(service, rows, model_path), f"data.val_files={rows / 'val.jsonl'}"])
    text = " ".join(capsys.readouterr().out.split())
    assert status == 0, text
    assert "ready to train, 0 warnings" in text
    assert "data.train_files: 4 rows: game 4" in text
    assert "the same seed gives the same start" in text
    assert "ended as terminated, return +1.5" in text
    assert service.live_count == 0


def test_prompt_and_turn_are_shown_as_the_model_gets_them(check):
    _, text = check()
    assert "<|im_start|>system Reach the goal." in text
    assert '<tool_call> {"name": "move", "arguments": {"direction":' in text
    assert "</tool_call><|im_end|> +0.5" in text


def test_long_prompts_are_shown_whole_on_demand(check, service):
    service.script("game", EnvScript(task_prompt="line\n" * 200, steps=[SOLVED]))
    assert "lines more (--full shows them)" in check()[1]
    assert "lines more" not in check(is_full=True)[1]


BROKEN_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "nonsense"}}}
NAMELESS_TOOL = {"name": "f"}
UNLIKE = Step(observation=[{"role": "tool", "tool_call_id": "other", "content": "moved"}])


@pytest.mark.parametrize(
    ("script", "status", "text"),
    [
        (EnvScript(task_prompt="", observation=[]), 1, "the model would see no task"),
        (EnvScript(observation=[], steps=[SOLVED]), 0, "the first observation is empty"),
        (EnvScript(tools_schema=[BROKEN_TOOL], steps=[SOLVED]), 1, "parameters of tool f are no JSON schema"),
        (EnvScript(tools_schema=[NAMELESS_TOOL], steps=[SOLVED]), 1, "tool 1 is"),
        (EnvScript(tools_schema=[MOVE_TOOL, MOVE_TOOL], steps=[SOLVED]), 1, "several tools are called move"),
        (EnvScript(start={"done": True}), 0, "over before its first turn"),
        (EnvScript(info={"log": "x" * 200_000}, steps=[SOLVED]), 0, "info has 200 kB"),
        (EnvScript(observation=[{"role": "game", "content": "x"}], steps=[SOLVED]), 0, "has the role 'game'"),
        (EnvScript(steps=[Step(reward=1.0, done=True)]), 0, "env.success_key"),
        (EnvScript(steps=[Step(observation=[]), SOLVED]), 0, "empty observation"),
        (EnvScript(steps=[UNLIKE, SOLVED]), 0, "which was not called"),
        (EnvScript(steps=[Step(reward="a lot")]), 1, "the episode failed"),
        (EnvScript(steps=[Step(info={"success": False})]), 0, "ended as max_turn"),
        (EnvScript(tools_schema=[], steps=[SOLVED]), 0, "0 tools"),
    ],
)
def test_environment_is_looked_at(check, service, script, status, text):
    service.script("game", script)
    found_status, found_text = check()
    assert text in found_text
    assert found_status == status, found_text


@pytest.mark.parametrize(
    ("estimator", "status"), [("gae", 0), ("grpo", 1)], ids=["nothing is compared", "rollouts are compared"]
)
def test_seed_that_decides_nothing_is_an_error_for_groups(check, service, estimator, status):
    """P90."""
    service.fault("patch", call="initialize", episode=1, patch={"observation": "You stand somewhere else."})
    found_status, text = check("actor_rollout_ref.rollout.n=4", f"algorithm.adv_estimator={estimator}")
    assert "seed 0 gave two different starts (observation)" in text
    assert found_status == status


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["env.environment_endpoint=http://127.0.0.1:9"], "the service does not answer"),
        (["env.environment_endpoint=nowhere"], "expected an http:// or https:// URL"),
        (["data.train_files=none.jsonl"], "'none.jsonl' does not exist"),
        (["data.train_batch_size=5"], "do not fill one batch of data.train_batch_size=5"),
        (["data.max_prompt_length=16"], "raise data.max_prompt_length"),
        (["data.max_prompt_length=8000", "data.max_response_length=500"], "longer than the model's 8192"),
        (["actor_rollout_ref.model.path=/no/model"], "no tokenizer at /no/model"),
        (["data.agent_prompt_style=klingon"], "data.agent_prompt_style"),
        (["trainer.logger=[console,swanlab]"], "swanlab"),
        (["env.bearer_token_env=NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE"),
    ],
)
def test_what_cannot_work_is_an_error_with_advice(check, overrides, text):
    status, found = check(*overrides)
    assert text in found
    assert "→" in found
    assert status == 1


def test_each_of_several_services_is_asked(check, service):
    """The one that answers is looked at all the same."""
    status, text = check(f"env.environment_endpoint=[{service.url},http://127.0.0.1:9]")
    assert status == 1
    assert f"{service.url} answers" in text
    assert "the service does not answer: health at http://127.0.0.1:9/" in text
    assert "the same seed gives the same start" in text and "1 error" in text


def test_one_error_does_not_hide_the_next(check, service):
    service.fault("status", call="step", times=None)
    _, text = check("trainer.logger=[console,swanlab]")
    assert "swanlab" in text and "the episode failed" in text
    assert "2 errors" in text


def test_unknown_environment_names_row_and_service(check, rows):
    """P64: a typing error in the data is found before training."""
    (rows / "train.jsonl").write_text('{"env_name": "gane", "seed": 0, "env_kwargs": {}}\n' * 4)
    status, text = check()
    assert "gane seed 0 cannot be opened" in text
    assert status == 1


def test_turns_that_will_not_fit_are_predicted(check, service):
    service.script("game", EnvScript(steps=[Step(observation="You moved. " * 40), SOLVED]))
    status, text = check("env.max_turn=50", "data.max_prompt_length=2000", "data.max_response_length=100")
    assert "of env.max_turn=50 turns fit into data.max_prompt_length=2000" in text
    assert status == 0


def test_longest_replies_are_counted_too(check):
    _, text = check("env.max_turn=20", "data.max_prompt_length=4000", "data.max_response_length=512")
    assert "with replies at data.max_response_length about" in text


def test_episodes_in_both_splits_are_named(check, rows):
    (rows / "val.jsonl").write_text((rows / "train.jsonl").read_text())
    assert "4 episodes are in both splits" in check()[1]


def test_missing_validation_file_is_a_warning(service, rows, model_path, capsys):
    status = main(good_arguments(service, rows, model_path))
    assert "data.val_files is not set" in capsys.readouterr().out
    assert status == 0


def test_typing_error_exits_with_2(capsys):
    assert main(["env.max_turns=3"]) == 2
    assert "max_turns" in capsys.readouterr().err


def test_doctor_imports_neither_ray_nor_vllm_nor_verl(service, rows, model_path):
    arguments = good_arguments(service, rows, model_path)
    code = (
        "import sys; from recipe.agent_env.check import main\n"
        f"assert main({arguments!r}) == 0\n"
        "found = {'ray', 'vllm', 'verl'} & set(sys.modules); assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


SCHEMAS = {
    "no arguments": {"type": "object", "properties": {}},
    "no schema": {},
    "enum and const": {"properties": {"a": {"enum": [1, "x"]}, "b": {"const": 3}}, "required": ["a", "b"]},
    "bounds": {
        "properties": {
            "i": {"type": "integer", "minimum": 3, "maximum": 4},
            "j": {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 5},
            "f": {"type": "number", "maximum": -1},
            "s": {"type": "string", "minLength": 9},
            "t": {"type": "string", "maxLength": 2},
        },
        "required": ["i", "j", "f", "s", "t"],
    },
    "nested": {
        "properties": {
            "path": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "minItems": 2},
            "where": {"allOf": [{"type": "object", "properties": {"x": {"type": "boolean"}}}]},
            "either": {"type": ["string", "integer"]},
        },
        "required": ["path", "where", "either"],
    },
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_random_calls_fit_their_schema(schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    rng = random.Random(0)
    for _ in range(30):
        action = random_action(tools, rng)
        assert len(action["tool_calls"]) == 1
        assert check_tool_calls(action, tools) is None


def test_schema_that_chance_cannot_meet_gives_text():
    pattern = {"properties": {"a": {"type": "string", "pattern": "^[0-9]{40}$"}}, "required": ["a"]}
    action = random_action([{"type": "function", "function": {"name": "f", "parameters": pattern}}], random.Random(0))
    assert action["tool_calls"] == [] and action["content"]


@pytest.mark.parametrize(
    ("style_name", "make"),
    [
        ("qwen2_5", qwen2_5_tokenizer),
        ("chat_template", qwen2_5_tokenizer),
        ("chat_template", qwen3_tokenizer),
        ("chat_template", llama3_tokenizer),
    ],
    ids=["qwen2_5", "template of qwen2_5", "template of qwen3", "template of llama3"],
)
def test_encoded_reply_is_what_a_model_would_sample(style_name, make):
    style = get_prompt_style(style_name)(make())
    action = random_action([MOVE_TOOL], random.Random(1))
    ids = encode_reply(style, action)
    parsed = style.parse_reply(ids, [MOVE_TOOL])
    assert parsed.error is None
    assert parsed.message["tool_calls"][0]["function"] == action["tool_calls"][0]["function"]
    assert style.is_turn_closed(ids)
    assert ids.count(ids[-1]) == 1
