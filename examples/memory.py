# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Memory that a training setting takes on each GPU, computed from what its run script would start.

    python -m examples.memory examples/sokoban/run_qwen2_5-7b_8gpu.sh
    LORA_RANK=32 python -m examples.memory examples/sokoban/run_qwen2_5-1.5b_1gpu_grpo.sh --card-gb 24 env.max_turn=5

Owns: the formulas, each with its source. Refuses to know: how a script chooses its values. For verl's FSDP engines with
vLLM on the same GPUs, where trainer and rollout take turns. An estimate to choose a setting by, not a measurement, and
on the high side: what peaks one after the other within an update is added up. GB is 10^9 bytes.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from examples.run_script import compose_config, read_overrides

GB = 10**9
CARDS_GB = (24, 40, 48, 80, 141)
"""Sizes of common cards; vLLM takes its share of each."""

RESERVE_BYTES = 3 * GB
"""CUDA context, NCCL buffers, graphs that vLLM keeps while asleep, fragmentation. A guess, the only one here."""

_BF16, _FP32 = 2, 4
_ADAM = 2 * _FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The fields of a Qwen2 `config.json` that decide sizes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ties_embeddings: bool
    """Whether the output head is the input embedding."""

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def _linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear maps of one layer: q, k, v, o, gate, up, down."""
        h, kv, m = self.hidden_size, self.num_kv_heads * self.head_size, self.intermediate_size
        return [(h, h), (h, kv), (h, kv), (h, h), (h, m), (h, m), (m, h)]

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer: the maps, the biases of q, k and v, two norms."""
        biases = self.hidden_size + 2 * self.num_kv_heads * self.head_size
        return sum(a * b for a, b in self._linears) + biases + 2 * self.hidden_size

    @property
    def root_params(self) -> int:
        """Parameters outside of the layers: embedding, head unless it is tied, last norm."""
        return self.vocab_size * self.hidden_size * (1 if self.ties_embeddings else 2) + self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters of the language model. Source: transformers, models/qwen2/modeling_qwen2.py."""
        return self.num_layers * self.layer_params + self.root_params

    @property
    def num_critic_params(self) -> int:
        """The same with a head of one value, as verl's critic has (`AutoModelForTokenClassification`)."""
        embedding = self.vocab_size * self.hidden_size
        return self.num_layers * self.layer_params + embedding + self.hidden_size + self.hidden_size + 1

    def num_lora_params(self, rank: int) -> int:
        """Parameters of adapters on all linear maps of the layers. Source: LoRA (arXiv:2106.09685), B A with rank r."""
        return self.num_layers * sum(rank * (a + b) for a, b in self._linears)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in bfloat16, over all layers. Source: vLLM, `AttentionSpec.page_size_bytes`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * _BF16

    @property
    def checkpoint_bytes_per_token(self) -> int:
        """What stays of the forward pass with gradient checkpointing: the input of each layer, in bfloat16.

        Source: 2sbh bytes per layer with full recomputation, arXiv:2205.05198.
        """
        return self.num_layers * self.hidden_size * _BF16

    @property
    def layer_bytes_per_token(self) -> int:
        """What one layer keeps for its backward pass, with attention that stores no matrix of scores.

        In bfloat16: both norms' normalised input and output, q, k, v, the attention's output, gate, activated gate, up
        and their product. In float32: both norms' input and scale, and the attention's log-sum per head.
        Source: modeling_qwen2.py, counted in the way of arXiv:2205.05198; a test compares it with what autograd keeps.
        """
        h, kv, m = self.hidden_size, self.num_kv_heads * self.head_size, self.intermediate_size
        return _BF16 * (6 * h + 2 * kv + 4 * m) + _FP32 * (2 * h + 2 + self.num_heads)


_QWEN2_5 = {
    "0.5B": ModelShape(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        ties_embeddings=True,
    ),
    "1.5B": ModelShape(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        ties_embeddings=True,
    ),
    "3B": ModelShape(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        ties_embeddings=True,
    ),
    "7B": ModelShape(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        ties_embeddings=False,
    ),
}
MODELS = {f"Qwen/Qwen2.5-{size}{kind}": shape for size, shape in _QWEN2_5.items() for kind in ("", "-Instruct")}
"""Source: `config.json` of each model. Others are read from their folder."""


def find_shape(path: str) -> ModelShape:
    """The shape of a known model, or of the Qwen2 model in a folder.

    Raises:
        ValueError: It is neither.
    """
    if path in MODELS:
        return MODELS[path]
    try:
        fields: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    except OSError:
        raise ValueError(
            f"model {path!r}: neither a folder with a config.json nor one of {', '.join(MODELS)}"
        ) from None
    if fields.get("model_type") != "qwen2":
        raise ValueError(f"model {path!r}: model_type is {fields.get('model_type')!r}, the formulas here are for qwen2")
    return ModelShape(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        ties_embeddings=fields["tie_word_embeddings"],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model that FSDP trains in float32 with bfloat16 compute, on one GPU of its group.

    All sizes in bytes. A parameter takes 4 for itself, 4 for its gradient and 8 for Adam's two moments: 16, sharded
    over the GPUs. Source: ZeRO (arXiv:1910.02054) counts 16 for mixed-precision Adam too, with 16-bit weights and
    gradients kept beside the 32-bit ones; verl's FSDP makes those one unit at a time (`model_dtype: fp32`).
    """

    weights: int
    gradients: int
    optimizer: int
    unsharded: int
    """Copies of whole units while they compute: the root unit, this layer and the next in bfloat16, and the largest
    unit's gradient, in bfloat16 and as float32 for the reduction. Source: PyTorch FSDP (arXiv:2304.11277)."""

    offloads_weights: bool
    offloads_optimizer: bool

    @property
    def resident(self) -> int:
        """What stays on the GPU while another model computes."""
        return (0 if self.offloads_weights else self.weights) + (0 if self.offloads_optimizer else self.optimizer)

    @property
    def offloaded(self) -> int:
        """What goes to the host's memory, per GPU."""
        return self.weights + self.optimizer - self.resident

    @property
    def training(self) -> int:
        """What its own update holds, activations aside."""
        return self.weights + self.gradients + self.optimizer + self.unsharded


def train_state(
    *,
    num_params: int,
    num_trained: int,
    root_params: int,
    layer_params: int,
    num_gpus: int,
    offloads: tuple[bool, bool],
) -> TrainedModel:
    """The training state of one model.

    Args:
        num_params: Of the whole model, adapters included.
        num_trained: Of those, what has gradients and optimizer states.
        root_params: Outside of the layers.
        layer_params: Of one layer.
        num_gpus: That FSDP shards over.
        offloads: Weights and optimizer go to the host between uses.
    """
    largest = max(root_params, layer_params) if num_trained == num_params else num_trained
    return TrainedModel(
        weights=_FP32 * num_params // num_gpus,
        gradients=_FP32 * num_trained // num_gpus,
        optimizer=_ADAM * num_trained // num_gpus,
        unsharded=_BF16 * (root_params + 2 * layer_params) + (_BF16 + _FP32) * largest,
        offloads_weights=offloads[0],
        offloads_optimizer=offloads[1],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a setting takes on each GPU, by phase; the largest counts. Bytes."""

    parts: dict[str, dict[str, int]]
    """Phase, then what is in memory at its peak."""

    host: int
    """On the host, per GPU."""

    kv_tokens: int
    """Tokens whose keys and values one inference engine holds."""

    facts: dict[str, str]
    """What it was computed from."""

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(self.totals.values())


def estimate(config: DictConfig, card_gb: float, row_tokens: int | None = None) -> Estimate:
    """What a composed config takes.

    Args:
        config: See `run_script.compose_config`.
        card_gb: Memory of one GPU; vLLM takes its share of it.
        row_tokens: Longest row, where micro-batches are counted in rows. None: the longest there can be.

    Raises:
        ValueError: The model is unknown, or the setting is one that the formulas do not cover.
    """
    actor_config, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if not str(actor_config.strategy).startswith("fsdp") or not config.actor_rollout_ref.model.use_remove_padding:
        raise ValueError("the formulas are for actor.strategy=fsdp or fsdp2 with model.use_remove_padding=True")
    if not config.actor_rollout_ref.model.enable_gradient_checkpointing:
        raise ValueError("the formulas are for model.enable_gradient_checkpointing=True")
    shape = find_shape(config.actor_rollout_ref.model.path)
    num_gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    row_tokens = row_tokens or rollout.max_model_len
    rank = config.actor_rollout_ref.model.lora_rank
    num_adapter = shape.num_lora_params(rank) if rank else 0

    actor = train_state(
        num_params=shape.num_params + num_adapter,
        num_trained=num_adapter or shape.num_params,
        root_params=shape.root_params,
        layer_params=shape.layer_params,
        num_gpus=num_gpus,
        offloads=(actor_config.fsdp_config.param_offload, actor_config.fsdp_config.optimizer_offload),
    )
    tokens = _micro_batch_tokens(actor_config, row_tokens)
    resident = {"actor weights and optimizer": actor.resident}
    critic = None
    if config.critic.enable:
        critic_shape = find_shape(config.critic.model.path)
        critic = train_state(
            num_params=critic_shape.num_critic_params,
            num_trained=critic_shape.num_critic_params,
            root_params=critic_shape.vocab_size * critic_shape.hidden_size,
            layer_params=critic_shape.layer_params,
            num_gpus=num_gpus,
            offloads=(config.critic.fsdp.param_offload, config.critic.fsdp.optimizer_offload),
        )
        resident["critic weights and optimizer"] = critic.resident

    reserve = {"reserve": RESERVE_BYTES}
    tensor_parallel = rollout.tensor_model_parallel_size
    engine_share = int(rollout.gpu_memory_utilization * card_gb * GB)
    engine_weights = _BF16 * shape.num_params // tensor_parallel
    kv_per_gpu = engine_share - engine_weights - _engine_activations(shape, rollout.max_num_batched_tokens)
    sync = (
        _FP32 * shape.vocab_size * shape.hidden_size + rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20
    )
    parts = {
        "rollout": {**resident, "vLLM: weights, keys and values": engine_share, **reserve},
        "weights to vLLM": {
            **resident,
            "actor weights, loaded": actor.weights if actor.offloads_weights else 0,
            "vLLM: weights": engine_weights,
            "largest tensor and bucket": sync,
            **reserve,
        },
        "actor update": {
            **{name: size for name, size in resident.items() if not name.startswith("actor")},
            "actor weights, gradients, optimizer": actor.weights + actor.gradients + actor.optimizer,
            "whole units": actor.unsharded,
            "layer inputs": tokens * shape.checkpoint_bytes_per_token,
            "one layer": tokens * shape.layer_bytes_per_token,
            "logits": tokens * shape.vocab_size * _logit_bytes(actor_config),
            **reserve,
        },
    }
    facts = {
        "model": f"{shape.num_params / 1e9:.2f} B parameters",
        "GPUs": str(num_gpus),
        "tokens per micro-batch": f"{tokens} (actor)",
    }
    if rank:
        facts["adapters"] = f"{num_adapter / 1e6:.1f} M parameters, rank {rank}"
    if critic is not None:
        critic_tokens = _micro_batch_tokens(config.critic, row_tokens)
        facts["tokens per micro-batch"] += f", {critic_tokens} (critic)"
        parts["critic update"] = {
            "actor weights and optimizer": actor.resident,
            "critic weights, gradients, optimizer": critic.weights + critic.gradients + critic.optimizer,
            "whole units": critic.unsharded,
            "layer inputs": critic_tokens * critic_shape.checkpoint_bytes_per_token,
            "one layer": critic_tokens * critic_shape.layer_bytes_per_token,
            **reserve,
        }
    return Estimate(
        parts=parts,
        host=actor.offloaded + (critic.offloaded if critic is not None else 0),
        kv_tokens=max(0, kv_per_gpu * tensor_parallel // shape.kv_bytes_per_token),
        facts=facts,
    )


def _micro_batch_tokens(section: DictConfig, row_tokens: int) -> int:
    if section.use_dynamic_bsz:
        return section.ppo_max_token_len_per_gpu
    return section.ppo_micro_batch_size_per_gpu * row_tokens


def _logit_bytes(actor_config: DictConfig) -> int:
    """Bytes per token and vocabulary entry at the peak of the actor.

    The logits in bfloat16 and, where flash-attention's in-place kernel is missing, their log-softmax in float32 and
    its gradient. Entropy, unless it is taken in chunks: softmax and products in float32 beside the logits.
    Source: `logprobs_from_logits` and `entropy_from_logits`, verl 0.9.1, utils/torch_functional.py.
    """
    log_probs = _BF16 + _FP32 + _FP32
    entropy = 0 if actor_config.entropy_from_logits_with_chunking else _BF16 + 3 * _FP32
    return max(log_probs, entropy)


def _engine_activations(shape: ModelShape, max_num_batched_tokens: int) -> int:
    """What vLLM sets aside for one forward pass of its largest batch: gate, up, their product, and residuals."""
    return _BF16 * max_num_batched_tokens * (3 * shape.intermediate_size + 4 * shape.hidden_size)


def fits(config: DictConfig, card_gb: float, row_tokens: int | None = None) -> bool:
    """Whether GPUs of this size hold the setting, and keys and values of at least one row of full length."""
    found = estimate(config, card_gb, row_tokens)
    return found.peak <= card_gb * GB and found.kv_tokens >= config.actor_rollout_ref.rollout.max_model_len


def describe(config: DictConfig, card_gb: float, row_tokens: int | None = None) -> str:
    """The estimate as text."""
    found = estimate(config, card_gb, row_tokens)
    lines = [f"{name}: {fact}" for name, fact in found.facts.items()]
    for phase, parts in found.parts.items():
        lines.append(f"\n{phase}: {found.totals[phase] / GB:.1f} GB per GPU")
        lines += [f"  {size / GB:6.1f}  {name}" for name, size in parts.items() if size]
    max_model_len = config.actor_rollout_ref.rollout.max_model_len
    cards = [f"{size} GB" for size in CARDS_GB if fits(config, size, row_tokens)]
    verdict = "fits" if fits(config, card_gb, row_tokens) else "does not fit"
    lines += [
        f"\nkeys and values: {found.kv_tokens} tokens per engine, {found.kv_tokens / max_model_len:.1f} full rows",
        f"host memory: {found.host / GB:.1f} GB per GPU",
        f"peak: {found.peak / GB:.1f} GB; {verdict} into {card_gb:g} GB",
        f"cards that hold it: {', '.join(cards) or 'none'}",
    ]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.memory", description="Memory of a run script's setting, per GPU."
    )
    parser.add_argument("script", type=Path, help="for example examples/sokoban/run_qwen2_5-7b_8gpu.sh")
    parser.add_argument("--card-gb", type=float, default=80, help="memory of one GPU in GB (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, help="longest row, where micro-batches are counted in rows")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="given to the script")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the estimate of a run script.

    Returns:
        Exit status: 0 when it fits into the card, 1 when it does not, 2 when it cannot be told.
    """
    args = build_parser().parse_args(arguments)
    try:
        config = compose_config(read_overrides(args.script, args.overrides))
        print(describe(config, args.card_gb, args.row_tokens))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if fits(config, args.card_gb, args.row_tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
