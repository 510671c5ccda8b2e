# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""docs/configuration.md is what the yaml files say, and what they say is what Hydra composes."""

import re
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from scripts import config_reference
from scripts.config_reference import CONFIG, PAGE, ROOT, ReferenceError, main, read_sections
from tests.test_config_on_cpu import composed

MAIN = read_sections(CONFIG / "agent_ppo_trainer.yaml")
CPU = read_sections(CONFIG / "platform" / "cpu.yaml")


def test_page_is_up_to_date(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_page_that_is_out_of_date_is_told(tmp_path, monkeypatch, capsys):
    old = tmp_path / "configuration.md"
    old.write_text(PAGE.read_text(encoding="utf-8").replace("`10`", "`11`", 1), encoding="utf-8")
    monkeypatch.setattr(config_reference, "PAGE", old)
    monkeypatch.setattr(config_reference, "ROOT", tmp_path)
    assert main(["--check"]) == 1
    assert "make docs" in capsys.readouterr().err
    assert main([]) == 0 and main(["--check"]) == 0


@pytest.mark.parametrize(("sections", "overrides"), [(MAIN, []), (CPU, ["+platform=cpu"])], ids=["main", "cpu"])
def test_defaults_are_those_that_hydra_composes(sections, overrides):
    reference = ["env.environment_endpoint", "env.max_turn", "data.agent_prompt_style", "algorithm.adv_estimator"]
    given = [
        *reference,
        *(f"data.{key}" for key in ("max_prompt_length", "max_response_length", "truncation")),
        *(f"critic.model.fsdp_config.{key}_offload" for key in ("param", "optimizer")),
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "critic.model.use_remove_padding",
        "critic.model.enable_gradient_checkpointing",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
    ]
    raw = OmegaConf.to_container(composed(*overrides), resolve=False)
    num_compared = 0
    for key in (key for section in sections for key in section.keys):
        value = raw
        for part in key.path.split("."):
            value = value[part]
        if key.path not in given:  # what the tests' own command line does not set
            assert value == yaml.safe_load(key.default), key.path
            num_compared += 1
    assert num_compared > 25


def test_key_without_a_comment_is_refused(tmp_path):
    path = tmp_path / "new.yaml"
    path.write_text("env:\n\n  # Known.\n  a: 1\n\n  b: 2\n")
    with pytest.raises(ReferenceError, match="env.b has no comment"):
        read_sections(path)


@pytest.mark.timeout(240)
def test_commands_of_the_page_run():
    block = re.search(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    shown = []
    for command in block.group(1).strip().splitlines():
        arguments = [sys.executable, *command.split()[1:]]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stderr[-2000:]
        shown.append(done.stdout)
    assert "max_model_len: ${agent_env.add" in shown[0]
    assert "max_turn: 10" in shown[1] and "actor_rollout_ref" not in shown[1]
