# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The memory estimate against published figures, against transformers and peft, and against torch's own bookkeeping."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from examples import memory, run_script

_SCRIPTS = Path(memory.__file__).parent / "sokoban"
_LARGE = _SCRIPTS / "run_qwen2_5-7b_8gpu.sh"
_SMALL = _SCRIPTS / "run_qwen2_5-1.5b_1gpu_grpo.sh"
_TINY = memory.ModelShape(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    ties_embeddings=False,
)


def _config_of(shape: memory.ModelShape) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        tie_word_embeddings=shape.ties_embeddings,
        attn_implementation="sdpa",
        num_labels=1,
    )


def _setting(script: Path, *arguments: str, **variables: str) -> DictConfig:
    return run_script.compose_config(run_script.read_overrides(script, list(arguments), variables))


@pytest.mark.parametrize(
    ("size", "total", "without_embedding"),
    [("0.5B", 0.49, 0.36), ("1.5B", 1.54, 1.31), ("3B", 3.09, 2.77), ("7B", 7.62, 6.53)],
)
def test_parameters_are_those_of_the_model_cards(size: str, total: float, without_embedding: float) -> None:
    """The cards say 7.61 B for the largest; its safetensors hold 7,615,616,512."""
    shape = memory.MODELS[f"Qwen/Qwen2.5-{size}-Instruct"]
    assert round(shape.num_params / 1e9, 2) == total
    assert round((shape.num_params - shape.root_params) / 1e9, 2) == without_embedding


@pytest.mark.parametrize("ties_embeddings", [False, True])
def test_parameters_are_those_that_transformers_makes(ties_embeddings: bool) -> None:
    shape = replace(_TINY, ties_embeddings=ties_embeddings)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(_config_of(shape))
        critic = Qwen2ForTokenClassification(_config_of(shape))
    assert model.num_parameters() == shape.num_params
    assert critic.num_parameters() == shape.num_critic_params


def test_adapters_are_those_that_peft_makes() -> None:
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        model = get_peft_model(Qwen2ForCausalLM(_config_of(_TINY)), LoraConfig(r=8, target_modules="all-linear"))
    assert model.get_nb_trainable_parameters()[0] == _TINY.num_lora_params(8)


def test_adam_takes_16_bytes_per_parameter_as_in_zero() -> None:
    """ZeRO, section 3.1: 24 GB for 1.5 B parameters; its figure 1: 1.9 GB each when 7.5 B are sharded over 64 GPUs."""

    def states_gb(num_params: int, num_gpus: int) -> float:
        state = memory.train_state(
            num_params=num_params,
            num_trained=num_params,
            root_params=0,
            layer_params=0,
            num_gpus=num_gpus,
            offloads=(False, False),
        )
        return (state.weights + state.gradients + state.optimizer) / memory.GB

    assert states_gb(1_500_000_000, 1) == 24
    assert round(states_gb(7_500_000_000, 64), 1) == 1.9


@pytest.mark.parametrize(("size", "kib"), [("0.5B", 12), ("1.5B", 28), ("7B", 56)])
def test_keys_and_values_per_token(size: str, kib: int) -> None:
    """2 (keys, values) x layers x KV heads x head size x 2 bytes."""
    assert memory.MODELS[f"Qwen/Qwen2.5-{size}"].kv_bytes_per_token == kib * 1024


def _saved_bytes(model: torch.nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass, weights aside, each storage once."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # else its address could be given to another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())


def test_activations_are_what_autograd_keeps() -> None:
    """One more layer keeps what the formula says, with and without gradient checkpointing."""
    num_tokens = 512
    ids = torch.randint(0, _TINY.vocab_size, (1, num_tokens))

    def kept_bytes(num_layers: int, has_checkpoints: bool) -> int:
        model = Qwen2ForCausalLM(_config_of(replace(_TINY, num_layers=num_layers))).to(torch.bfloat16).train()
        if has_checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return _saved_bytes(model, lambda: model(input_ids=ids, use_cache=False).logits)

    per_layer = {has: (kept_bytes(6, has) - kept_bytes(2, has)) / 4 for has in (False, True)}
    assert per_layer[False] == pytest.approx(num_tokens * _TINY.layer_bytes_per_token, rel=0.02)
    assert per_layer[True] == pytest.approx(num_tokens * _TINY.checkpoint_bytes_per_token / _TINY.num_layers, rel=0.02)


def test_settings_fit_into_the_cards_that_they_name() -> None:
    assert memory.fits(_setting(_LARGE), 80) and not memory.fits(_setting(_LARGE), 48)
    assert memory.fits(_setting(_SMALL), 80)
    assert memory.fits(_setting(_SMALL, LORA_RANK="32", OFFLOAD="False"), 40)
    assert memory.fits(_setting(_SMALL, LORA_RANK="32", OFFLOAD="False", TOKENS_PER_GPU="4352"), 24)


def test_micro_batches_counted_in_rows_fit_only_while_rows_are_short() -> None:
    rows = ["actor_rollout_ref.actor.use_dynamic_bsz=False", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"]
    rows += ["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32", "critic.ppo_micro_batch_size_per_gpu=32"]
    config = _setting(_LARGE, *rows)
    assert memory.fits(config, 80, row_tokens=1000)
    assert not memory.fits(config, 80)


def test_offload_and_more_gpus_leave_more_room() -> None:
    plain = memory.estimate(_setting(_LARGE), 80)
    offloaded = memory.estimate(_setting(_LARGE, OFFLOAD="True"), 80)
    assert plain.host == 0
    assert plain.totals["rollout"] - offloaded.totals["rollout"] == offloaded.host > 20 * memory.GB
    assert memory.estimate(_setting(_LARGE, NUM_NODES="2"), 80).peak < plain.peak


def test_command_prints_the_estimate_and_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main([str(_LARGE)]) == 0
    assert "fits into 80 GB" in capsys.readouterr().out
    assert memory.main([str(_LARGE), "--card-gb", "24"]) == 1
    assert "does not fit into 24 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([str(_LARGE), "actor_rollout_ref.model.path=me/mine"], "model 'me/mine': neither a folder"),
        ([str(_LARGE), "actor_rollout_ref.model.use_remove_padding=False"], "use_remove_padding=True"),
        ([str(_LARGE), "env.max_turn=0"], "env.max_turn"),
    ],
)
def test_what_cannot_be_told_is_refused(arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(arguments) == 2
    assert match in capsys.readouterr().err


def test_folder_of_a_model_is_read(tmp_path: Path) -> None:
    _config_of(_TINY).save_pretrained(tmp_path)
    assert memory.find_shape(str(tmp_path)) == _TINY
