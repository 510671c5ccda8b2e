#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Train a tiny policy on Sokoban without a GPU: PPO (GAE with critic), or ALGO=grpo. Options go through, as Hydra keys.
#
#   examples/sokoban/serve.sh &           # the environment service, at ENDPOINT
#   examples/sokoban/run_cpu.sh           # data and policy are made first where they are missing
#
# `python -m examples.sokoban.demo` does all of it and sums up the result; it runs this script.
set -euo pipefail

# What runs where.
PYTHON=${PYTHON:-python}
ENDPOINT=${ENDPOINT:-http://127.0.0.1:8000}
RUN_DIR=${RUN_DIR:-outputs/sokoban_cpu}
DATA_DIR=${DATA_DIR:-${RUN_DIR}/data}
MODEL=${MODEL:-${RUN_DIR}/policy}
TOKENIZER=${TOKENIZER:-${MODEL}/tokenizer}
SEED=${SEED:-1}

# What is learned from.
ALGO=${ALGO:-ppo}
STEPS=${STEPS:-20}
EPISODES_PER_STEP=${EPISODES_PER_STEP:-128}
MAX_STEPS=${MAX_STEPS:-8}

# How.
ACTOR_LR=${ACTOR_LR:-3e-4}
CRITIC_LR=${CRITIC_LR:-1e-3}
LR_WARMUP_STEPS=${LR_WARMUP_STEPS:-3}
MINI_BATCH=${MINI_BATCH:-32}
MICRO_BATCH=${MICRO_BATCH:-32}
CRITIC_MINI_BATCH=${CRITIC_MINI_BATCH:-16}
GROUP_SIZE=${GROUP_SIZE:-8}
TEST_FREQ=${TEST_FREQ:-10}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python && ${PYTHON} == python ]]; then
    PYTHON=.venv/bin/python
fi

case ${ALGO} in
    ppo)
        ROWS_PER_STEP=${EPISODES_PER_STEP}
        ESTIMATOR=(
            algorithm.adv_estimator=gae
            algorithm.gamma=1.0
            algorithm.lam=0.95
        )
        ;;
    grpo)
        # verl multiplies the mini-batch by the group size.
        ROWS_PER_STEP=$((EPISODES_PER_STEP / GROUP_SIZE))
        MINI_BATCH=$((MINI_BATCH / GROUP_SIZE))
        ESTIMATOR=(
            algorithm.adv_estimator=grpo
            actor_rollout_ref.rollout.n="${GROUP_SIZE}"
        )
        ;;
    *)
        echo "ALGO=${ALGO}: expected ppo or grpo" >&2
        exit 2
        ;;
esac

if [[ ! -f ${DATA_DIR}/train.parquet ]]; then
    "${PYTHON}" -m examples.sokoban.curate_data --out-dir "${DATA_DIR}" --num-train 4000 --num-test 100 \
        --dim 7 5 --boxes 1 --max-steps "${MAX_STEPS}" --min-solution 2 --max-solution 6
fi
if [[ ! -f ${MODEL}/config.json ]]; then
    "${PYTHON}" -m examples.sokoban.warm_start "${MODEL}" --train-file "${DATA_DIR}/train.parquet" --seed "${SEED}"
fi

exec "${PYTHON}" -m recipe.agent_env.main_agent_ppo \
    +platform=cpu \
    "${ESTIMATOR[@]}" \
    algorithm.use_kl_in_reward=False \
    env.environment_endpoint="${ENDPOINT}" \
    env.max_turn="${MAX_STEPS}" \
    env.max_concurrent_episodes=256 \
    data.agent_prompt_style=qwen2_5 \
    data.train_files="${DATA_DIR}/train.parquet" \
    data.val_files="${DATA_DIR}/test.parquet" \
    data.train_batch_size="${ROWS_PER_STEP}" \
    data.max_prompt_length=240 \
    data.max_response_length=16 \
    data.truncation=error \
    data.seed="${SEED}" \
    actor_rollout_ref.model.path="${MODEL}" \
    actor_rollout_ref.model.tokenizer_path="${TOKENIZER}" \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.tokenizer="${TOKENIZER}" \
    actor_rollout_ref.actor.optim.lr="${ACTOR_LR}" \
    actor_rollout_ref.actor.optim.lr_warmup_steps="${LR_WARMUP_STEPS}" \
    actor_rollout_ref.actor.ppo_mini_batch_size="${MINI_BATCH}" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="${MICRO_BATCH}" \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.data_loader_seed="${SEED}" \
    actor_rollout_ref.actor.fsdp_config.seed="${SEED}" \
    actor_rollout_ref.rollout.seed="${SEED}" \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="${MICRO_BATCH}" \
    critic.model.path="${MODEL}" \
    critic.model.tokenizer_path="${TOKENIZER}" \
    critic.optim.lr="${CRITIC_LR}" \
    critic.cliprange_value=10 \
    critic.ppo_mini_batch_size="${CRITIC_MINI_BATCH}" \
    critic.ppo_micro_batch_size_per_gpu="${CRITIC_MINI_BATCH}" \
    critic.data_loader_seed="${SEED}" \
    critic.fsdp.seed="${SEED}" \
    trainer.critic_warmup=0 \
    trainer.logger='[console,file]' \
    trainer.project_name=sokoban_cpu \
    trainer.experiment_name="${ALGO}_seed${SEED}" \
    trainer.default_local_dir="${RUN_DIR}/checkpoints" \
    trainer.resume_mode=disable \
    trainer.total_training_steps="${STEPS}" \
    trainer.total_epochs=1000 \
    trainer.test_freq="${TEST_FREQ}" \
    trainer.save_freq=-1 \
    "$@"
