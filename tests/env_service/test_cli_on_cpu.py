# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The command line: start, step log, signals, and clients that die."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.env_service.service import REPOSITORY, call, serve_process

ECHO = "tests.env_service.toy_envs:EchoEnv"
FAULTY = "tests.env_service.toy_envs:FaultyEnv"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end."""
    command = [sys.executable, "-m", "recipe.agent_env.env_service", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_service_imports_nothing_heavy():
    code = (
        "import sys, recipe.agent_env.env_service.app, recipe.agent_env.env_service.__main__;"
        "import examples.sokoban.sokoban_env;"
        "heavy = {'torch', 'ray', 'verl', 'numpy', 'pandas', 'pyarrow', 'transformers', 'gymnasium'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_binds_to_loopback_and_says_where():
    with serve_process(ECHO, "--name", "echo-v0") as process:
        assert process.first_line.startswith("serving echo-v0 at http://127.0.0.1:")
        assert process.service.step(process.service.open("echo-v0")).status_code == 200


def test_step_log_tells_what_the_environment_saw(tmp_path: Path):
    log = tmp_path / "steps.jsonl"
    with serve_process(ECHO, "--name", "echo-v0", "--log-steps", str(log)) as process:
        env_id = process.service.open("echo-v0", seed=4, max_steps=2)
        actions = [call("say", {"text": text}) for text in "ab"]
        for index in (0, 0, 1):
            process.service.step(env_id, actions[index], index=index)
        process.service.close(env_id)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["initialize", "step", "step", "close"]
    assert {(line["env_id"], line["env_name"], line["seed"]) for line in lines} == {(env_id, "echo-v0", 4)}
    steps = lines[1:3]
    assert [step["action"] for step in steps] == actions
    assert [(step["index"], step["reward"], step["terminated"]) for step in steps] == [(0, 1.0, False), (1, 2.0, True)]
    assert steps[1]["observation"][0]["content"] == "2: b"
    assert (lines[0]["env_kwargs"], lines[3]["how"]) == ({"max_steps": 2}, "closed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_signal_closes_every_session(tmp_path: Path, number: signal.Signals, workers: str):
    log = tmp_path / "steps.jsonl"
    with serve_process(ECHO, "--log-steps", str(log), "--workers", workers) as process:
        opened = {process.service.open("EchoEnv") for _ in range(5)}
        process.stop(number)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["env_id"] for line in lines if line["event"] == "close"} == opened


def test_hung_environment_does_not_hold_up_the_end():
    with serve_process(FAULTY, "--name", "faulty") as process:
        env_id = process.service.open("faulty", where="step", what="sleep", seconds=300.0)
        with pytest.raises(Exception, match="timed out"):
            process.service.http.post(
                f"{process.service.url}/api/environment/{env_id}/step", json={"action": {}}, timeout=0.3
            )
        process.stop()
        assert process.popen.returncode is not None


def test_sessions_of_a_killed_client_are_reaped():
    with serve_process(ECHO, "--name", "echo", "--idle-timeout-s", "1") as process:
        code = (
            "import sys, requests\n"
            "for _ in range(8):\n"
            "    body = {'env_name': 'echo', 'seed': 1}\n"
            "    requests.post(sys.argv[1] + '/api/environment/initialize', json=body).json()['env_id']\n"
            "print('open', flush=True)\n"
            "input()\n"
        )
        client = subprocess.Popen(
            [sys.executable, "-c", code, process.service.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None and client.stdout.readline() == "open\n"
        client.kill()
        client.communicate()
        stats = process.service.wait_for(lambda now: now["live_sessions"] == 0)
        assert (stats["opened"], stats["reaped"], stats["closed"]) == (8, 8, 0)


def test_token_from_a_file_is_needed(tmp_path: Path):
    (tmp_path / "token").write_text("s3cret\n")
    with serve_process(ECHO, "--token-file", str(tmp_path / "token"), "--log-level", "debug") as process:
        assert process.service.initialize("EchoEnv").status_code == 401
        process.service.http.headers["Authorization"] = "Bearer s3cret"
        assert process.service.initialize("EchoEnv").status_code == 200
        process.popen.terminate()
        output = "".join(process.popen.communicate(timeout=30))
        assert "s3cret" not in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere:X"], "No module named"),
        ([ECHO, "--max-sessions", "0"], "max_sessions"),
        ([ECHO, "--token-file", "/nonexistent"], "--token-file"),
        ([ECHO, "--log-steps", "/nonexistent/steps.jsonl"], "--log-steps"),
        ([ECHO, "--name", "a", "--name", "b"], "--name b"),
    ],
)
def test_wrong_arguments_end_with_the_reason(arguments: list[str], text: str):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and text in done.stderr and "Traceback" not in done.stderr


def test_open_address_without_a_token_is_warned_about():
    with serve_process(ECHO, "--host", "0.0.0.0") as process:
        process.popen.terminate()
        assert "no bearer token is set" in process.popen.communicate(timeout=30)[1]
