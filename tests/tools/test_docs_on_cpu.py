# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The commands of docs/bring_your_own_environment.md up to training, run as they stand there.

What is changed: ports, the model (a small one without weights), and what a person types.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prompt_styles.tokenizers import QWEN_PLAIN, QWEN_SPECIAL, small_tokenizer, template
from tests.tools.chat_server import ChatServer, call, say

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bring_your_own_environment.md").read_text(encoding="utf-8")
CLASS = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


class Shell:
    """Runs the page's commands in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.changes: dict[str, str] = {"python -": f"{sys.executable} -"}
        self._environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "COLUMNS": "200"}

    def text(self, block: str) -> str:
        for old, new in self.changes.items():
            block = block.replace(old, new)
        return block

    def run(self, block: str, *, typed: str = "", limit_s: float = 110) -> str:
        done = subprocess.run(
            ["bash", "-euc", self.text(block)],
            cwd=self.folder,
            env=self._environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def serve(self, block: str) -> subprocess.Popen[str]:
        arguments = self.text(block).split()
        return subprocess.Popen(arguments, cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, text=True)


def binary_search(body):
    """A model that plays well."""
    low, high = 1, 20
    said = [m for m in body["messages"] if m["role"] in ("assistant", "tool")]
    for guess, answer in zip(said[::2], said[1::2], strict=False):
        number = json.loads(guess["tool_calls"][0]["function"]["arguments"])["number"]
        low, high = (number + 1, high) if "higher" in answer["content"] else (low, number - 1)
    return say(None, call("guess", json.dumps({"number": (low + high) // 2})))


@pytest.mark.timeout(400)
def test_own_environment_is_served_played_checked_and_evaluated(tmp_path):
    assert CLASS is not None
    serve, play, rows, check, evaluate, *_ = BLOCKS
    shell = Shell(tmp_path)
    (tmp_path / "guess_env.py").write_text(CLASS.group(1), encoding="utf-8")
    tokenizer = small_tokenizer(
        QWEN_SPECIAL, QWEN_PLAIN, eos_token="<|im_end|>", chat_template=template("qwen2_5"), name_or_path="small"
    )
    tokenizer.save_pretrained(str(tmp_path / "model"))
    shell.changes["Qwen/Qwen2.5-1.5B-Instruct"] = str(tmp_path / "model")
    shell.changes["--port 8000"] = "--port 0"
    service = shell.serve(serve)
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        url = re.search(r"http://[\d.:]+", line)
        assert url is not None, line
        shell.changes["http://localhost:8000"] = url.group()
        shown = shell.run(f"{play.strip()} --env-url {url.group()}", typed="guess number=0\nguess number=30\n")
        assert "My number is higher." in shown and "My number is lower." in shown
        shell.run(rows)
        assert len((tmp_path / "train.jsonl").read_text().splitlines()) == 512
        assert "ready to train" in shell.run(check)
        with ChatServer(binary_search) as endpoint:
            shell.changes["http://localhost:8001/v1"] = endpoint.base_url
            shown = shell.run(evaluate)
        assert "100.0%" in shown and "64 episodes" in shown
        assert (tmp_path / "eval.html").stat().st_size > 10_000
    finally:
        service.terminate()
        service.wait(timeout=30)


def test_class_of_the_page_has_forty_lines_at_most():
    assert CLASS is not None
    assert len([line for line in CLASS.group(1).splitlines() if line.strip()]) <= 40
