# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the service's README shows works as shown."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from recipe.agent_env.env_service import app, registry, sessions, wire, workers
from recipe.agent_env.env_service.__main__ import build_parser
from tests.env_service.service import REPOSITORY, call, serve_process

README = (REPOSITORY / "recipe/agent_env/env_service/README.md").read_text()


def test_class_and_command_of_the_readme_run(tmp_path: Path):
    code = re.search(r"```python\n(from recipe.*?)```", README, re.DOTALL)
    command = re.search(r"```bash\n(python -m .*?)\n```", README, re.DOTALL)
    assert code and command
    (tmp_path / "counter_env.py").write_text(code[1])
    arguments = shlex.split(command[1])[1:]
    port = arguments.index("--port")
    del arguments[port : port + 2]
    path = f"{tmp_path}:{REPOSITORY}"
    with serve_process(command=[sys.executable, *arguments], PYTHONPATH=path) as process:
        service = process.service
        env_id = service.open("counter-v0", seed=3, max_steps=4)
        assert "exactly 8" in service.get(env_id, "task-prompt").json()["task_prompt"]
        answers = [service.step(env_id, call("add", {"amount": amount})).json() for amount in (5, 3)]
        assert [answer["reward"] for answer in answers] == [-0.1, 1.0]
        assert answers[1]["observation"][0]["content"] == "The counter is at 8." and answers[1]["done"] is True


def test_limits_of_the_readme_are_the_defaults():
    rows = re.findall(r"^\| `--([\w-]+)` \| ([\d.]+) \|", README, re.MULTILINE)
    assert len(rows) == 7
    for option, default in rows:
        assert float(default) == build_parser().get_default(option.replace("-", "_")), option


def test_error_words_of_the_readme_are_those_of_the_code():
    modules = (app, registry, sessions, wire, workers)
    source = "".join(Path(str(module.__file__)).read_text() for module in modules)
    words = set(re.findall(r"ServiceError\(\s*\d+,\s*\"(\w+)\"", source)) | {"not_found"}
    section = README.split("## Errors")[1].split("##")[0]
    assert words - {"internal_error"} == set(re.findall(r"`(\w+)`", section))


def test_command_line_help_names_every_option():
    done = subprocess.run(
        [sys.executable, "-m", "recipe.agent_env.env_service", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "--workers" in done.stdout and "--token-file" in done.stdout
