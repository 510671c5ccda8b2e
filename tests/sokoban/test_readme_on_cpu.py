# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The example's README, tried as a new user would: each command of "Your own environment instead", and its figures.

What is changed: the port, the model (a small tokenizer without weights), and that training is composed instead of run.
"""

import re
from pathlib import Path

import pytest

from examples import memory, run_script
from tests.prompt_styles.tokenizers import QWEN_PLAIN, QWEN_SPECIAL, small_tokenizer, template
from tests.tools.test_docs_on_cpu import ROOT, Shell

_PAGE = (ROOT / "examples/sokoban/README.md").read_text(encoding="utf-8")
_STEPS = [
    re.sub(r"^   ", "", block, flags=re.MULTILINE)
    for block in re.findall(r"^   ```bash\n(.*?)^   ```", _PAGE, re.DOTALL | re.MULTILINE)
]


@pytest.mark.timeout(400)
def test_own_environment_is_swapped_in_step_by_step(tmp_path: Path) -> None:
    write, serve, play, rows, check, train = _STEPS
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small_tokenizer(
        QWEN_SPECIAL, QWEN_PLAIN, eos_token="<|im_end|>", chat_template=template("qwen2_5"), name_or_path="small"
    ).save_pretrained(str(tmp_path / "model"))
    shell = Shell(tmp_path)
    shell.changes |= {"Qwen/Qwen2.5-1.5B-Instruct": str(tmp_path / "model"), "--port 8000": "--port 0"}
    shell.run(write)
    service = shell.serve(serve)
    try:
        assert service.stdout is not None
        url = re.search(r"http://[\d.:]+", service.stdout.readline())
        assert url is not None
        shell.changes["http://localhost:8000"] = url.group()
        shown = shell.run(f"{play.strip()} --env-url {url.group()}", typed="combine left=3 operator=+ right=4\n")
        assert "Target:" in shown
        shell.run(rows)
        assert "ready to train" in shell.run(check)
    finally:
        service.terminate()
        service.wait(timeout=30)
    words = train.replace("\\\n", " ").split()
    script = next(i for i, word in enumerate(words) if word.endswith(".sh"))
    variables = dict(word.split("=", 1) for word in words[:script])
    variables["DATA_DIR"] = str(tmp_path / variables["DATA_DIR"])
    overrides = run_script.read_overrides(ROOT / words[script], words[script + 1 :], variables)
    config = run_script.compose_config(overrides)
    assert config.data.train_files == str(tmp_path / "data/my_env/train.parquet")
    assert (config.env.environment_endpoint, config.env.max_turn) == ("http://localhost:8000", 8)
    assert config.trainer.project_name == "my_env"


@pytest.mark.parametrize(
    ("row", "script", "variables"),
    [
        ("`run_qwen2_5-7b_8gpu.sh`", "run_qwen2_5-7b_8gpu.sh", {}),
        ("`run_qwen2_5-1.5b_1gpu_grpo.sh`", "run_qwen2_5-1.5b_1gpu_grpo.sh", {}),
        ("the same with", "run_qwen2_5-1.5b_1gpu_grpo.sh", {"LORA_RANK": "32", "OFFLOAD": "False"}),
    ],
)
def test_memory_figures_are_what_the_command_prints(row: str, script: str, variables: dict[str, str]) -> None:
    stated = re.search(rf"^\| {re.escape(row)}.*\| (\d+) GB[^|]*\|$", _PAGE, re.MULTILINE)
    assert stated is not None
    path = ROOT / "examples/sokoban" / script
    found = memory.estimate(run_script.compose_config(run_script.read_overrides(path, [], variables)), card_gb=80)
    assert round(found.peak / memory.GB) == int(stated[1])
