#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Train Qwen2.5-7B-Instruct on Sokoban with eight 80 GB GPUs: PPO (GAE with critic), 10 turns. Options go through, as Hydra keys.
#
#   examples/sokoban/serve.sh &                      # the environment service, at ENDPOINT
#   examples/sokoban/run_qwen2_5-7b_8gpu.sh          # the rooms are curated first where they are missing
#
# `python -m examples.memory examples/sokoban/run_qwen2_5-7b_8gpu.sh` says what it needs per GPU.
set -euxo pipefail

# What runs where.
PYTHON=${PYTHON:-python}
ENDPOINT=${ENDPOINT:-http://127.0.0.1:8000}
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
RUN_DIR=${RUN_DIR:-outputs/sokoban_7b}
DATA_DIR=${DATA_DIR:-data/sokoban_10_turns}
NUM_GPUS=${NUM_GPUS:-8}
NUM_NODES=${NUM_NODES:-1}

# What is learned from. Rows are episodes; a context of MAX_PROMPT_LENGTH is read on the last turn at most.
MAX_TURN=${MAX_TURN:-10}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-15360}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-128}
TRAIN_BATCH=${TRAIN_BATCH:-256}
MINI_BATCH=${MINI_BATCH:-256}
EPOCHS=${EPOCHS:-15}
ACTOR_LR=${ACTOR_LR:-1e-6}
CRITIC_LR=${CRITIC_LR:-1e-5}
GAMMA=${GAMMA:-1.0}
LAM=${LAM:-1.0}

# How fast, and how much memory. Micro-batches are cut by tokens, so that long rows fit as well as short ones; the longest
# row, MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH, has to fit into one.
TENSOR_PARALLEL=${TENSOR_PARALLEL:-4}
GPU_MEMORY_UTILIZATION=${GPU_MEMORY_UTILIZATION:-0.4}
ACTOR_TOKENS_PER_GPU=${ACTOR_TOKENS_PER_GPU:-16384}
CRITIC_TOKENS_PER_GPU=${CRITIC_TOKENS_PER_GPU:-32768}
OFFLOAD=${OFFLOAD:-False}

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
    algorithm.adv_estimator=gae \
    algorithm.gamma="${GAMMA}" \
    algorithm.lam="${LAM}" \
    algorithm.use_kl_in_reward=False \
    env.environment_endpoint="${ENDPOINT}" \
    env.max_turn="${MAX_TURN}" \
    data.agent_prompt_style=qwen2_5 \
    data.train_files="${DATA_DIR}/train.parquet" \
    data.val_files="${DATA_DIR}/test.parquet" \
    data.train_batch_size="${TRAIN_BATCH}" \
    data.max_prompt_length="${MAX_PROMPT_LENGTH}" \
    data.max_response_length="${MAX_RESPONSE_LENGTH}" \
    data.truncation=error \
    actor_rollout_ref.model.path="${MODEL}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}" \
    actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH}" \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${ACTOR_TOKENS_PER_GPU}" \
    actor_rollout_ref.actor.entropy_from_logits_with_chunking=True \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.fsdp_config.param_offload="${OFFLOAD}" \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="${OFFLOAD}" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TENSOR_PARALLEL}" \
    actor_rollout_ref.rollout.gpu_memory_utilization="${GPU_MEMORY_UTILIZATION}" \
    actor_rollout_ref.rollout.max_num_batched_tokens=16384 \
    actor_rollout_ref.rollout.temperature=1.0 \
    critic.model.path="${MODEL}" \
    critic.model.use_remove_padding=True \
    critic.model.enable_gradient_checkpointing=True \
    critic.optim.lr="${CRITIC_LR}" \
    critic.ppo_max_token_len_per_gpu="${CRITIC_TOKENS_PER_GPU}" \
    critic.fsdp.param_offload="${OFFLOAD}" \
    critic.fsdp.optimizer_offload="${OFFLOAD}" \
    trainer.critic_warmup=0 \
    trainer.logger='[console,file]' \
    trainer.project_name=sokoban \
    trainer.experiment_name=qwen2_5_7b_gae \
    trainer.default_local_dir="${RUN_DIR}/checkpoints" \
    trainer.n_gpus_per_node="${NUM_GPUS}" \
    trainer.nnodes="${NUM_NODES}" \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs="${EPOCHS}" \
    "$@"
