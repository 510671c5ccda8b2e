#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Train Qwen2.5-1.5B-Instruct on Sokoban with one 80 GB GPU: GRPO, 8 rollouts per room. Options go through, as Hydra keys.
#
#   examples/sokoban/serve.sh &                              # the environment service, at ENDPOINT
#   examples/sokoban/run_qwen2_5-1.5b_1gpu_grpo.sh           # the rooms are curated first where they are missing
#
# All weights are trained, kept in the host's memory while others compute (OFFLOAD). LORA_RANK=32 trains adapters instead.
# `python -m examples.memory examples/sokoban/run_qwen2_5-1.5b_1gpu_grpo.sh` says what it needs.
set -euxo pipefail

# What runs where.
PYTHON=${PYTHON:-python}
ENDPOINT=${ENDPOINT:-http://127.0.0.1:8000}
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
RUN_DIR=${RUN_DIR:-outputs/sokoban_1.5b_grpo}
DATA_DIR=${DATA_DIR:-data/sokoban_10_turns}

# What is learned from. ROWS_PER_STEP and MINI_BATCH count rooms; verl multiplies both by GROUP_SIZE.
MAX_TURN=${MAX_TURN:-10}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-4096}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-128}
GROUP_SIZE=${GROUP_SIZE:-8}
ROWS_PER_STEP=${ROWS_PER_STEP:-32}
MINI_BATCH=${MINI_BATCH:-16}
EPOCHS=${EPOCHS:-2}
LORA_RANK=${LORA_RANK:-0}
ACTOR_LR=${ACTOR_LR:-$([[ ${LORA_RANK} == 0 ]] && echo 1e-6 || echo 2e-5)}

# How fast, and how much memory. Micro-batches are cut by tokens; the longest row has to fit into one.
GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.5}
TOKENS_PER_GPU=${TOKENS_PER_GPU:-16384}
OFFLOAD=${OFFLOAD:-True}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python && ${PYTHON} == python ]]; then
    PYTHON=.venv/bin/python
fi
mkdir -p "${RUN_DIR}"
VERL_FILE_LOGGER_PATH=$(realpath "${RUN_DIR}")/metrics.jsonl
export VERL_FILE_LOGGER_PATH

if [[ ! -f ${DATA_DIR}/train.parquet ]]; then
    "${PYTHON}" -m examples.sokoban.curate_data --out-dir "${DATA_DIR}" --num-train 10000 --num-test 100 \
        --dim 7 7 --boxes 1 --max-steps "${MAX_TURN}"
fi

exec "${PYTHON}" -m recipe.agent_env.main_agent_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    env.environment_endpoint="${ENDPOINT}" \
    env.max_turn="${MAX_TURN}" \
    data.agent_prompt_style=qwen2_5 \
    data.train_files="${DATA_DIR}/train.parquet" \
    data.val_files="${DATA_DIR}/test.parquet" \
    data.train_batch_size="${ROWS_PER_STEP}" \
    data.max_prompt_length="${MAX_PROMPT_LENGTH}" \
    data.max_response_length="${MAX_RESPONSE_LENGTH}" \
    data.truncation=error \
    actor_rollout_ref.model.path="${MODEL}" \
    actor_rollout_ref.model.lora_rank="${LORA_RANK}" \
    actor_rollout_ref.model.lora_alpha="${LORA_RANK}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}" \
    actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH}" \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${TOKENS_PER_GPU}" \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.fsdp_config.param_offload="${OFFLOAD}" \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="${OFFLOAD}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n="${GROUP_SIZE}" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION}" \
    actor_rollout_ref.rollout.temperature=1.0 \
    trainer.logger='[console,file]' \
    trainer.project_name=sokoban \
    trainer.experiment_name=qwen2_5_1.5b_grpo \
    trainer.default_local_dir="${RUN_DIR}/checkpoints" \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.total_epochs="${EPOCHS}" \
    "$@"
