# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The FSDP2 engines on host memory, built in a process of their own: verl fixes its platform at import."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)
    probe = Path(__file__).with_name("engine_probe.py")
    done = subprocess.run([sys.executable, str(probe), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("role", ["critic", "actor", "ref"])
def test_engine_lives_in_host_memory_in_float32(report, role):
    assert report[role]["devices"] == ["cpu"] and report[role]["dtypes"] == ["torch.float32"]
    assert report[role]["sharded"] and report[role]["exported"]


@pytest.mark.parametrize("role", ["critic", "actor", "ref"])
def test_attention_is_torchs(report, role):
    """verl's loader of value heads asks for flash attention by name, whatever the config says."""
    assert report[role]["attention"] == "sdpa"


def test_critic_has_one_value_per_token(report):
    assert report["critic"]["module"] == "FSDPQwen2ForTokenClassification"
    assert report["critic"]["output"] == [2, 3, 1] and report["critic"]["model_type"] == "value_model"


def test_reference_policy_is_forward_only_without_offloading(report):
    assert report["ref"]["forward_only"] and not report["ref"]["has_optimizer"]
    assert report["actor"]["has_optimizer"] and report["critic"]["has_optimizer"]


def test_a_critic_without_token_classification_is_refused():
    from recipe.agent_env.platform_cpu.engines import CPUEngineWithValueHead

    engine = object.__new__(CPUEngineWithValueHead)
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["T5ForConditionalGeneration"]))
    with pytest.raises(ValueError, match="critic.model.path: architecture 'T5ForConditionalGeneration'"):
        engine._build_module()
