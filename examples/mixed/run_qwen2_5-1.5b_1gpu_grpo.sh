#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Train one policy on three environments at once with one 80 GB GPU: the Sokoban script on other data. Options go through.
#
#   examples/mixed/serve.sh &                              # all three environments, at ENDPOINT
#   examples/mixed/run_qwen2_5-1.5b_1gpu_grpo.sh           # the episodes are made first where they are missing
#
# Success per environment: env/success_rate/<env_name> in training, val-core/<env_name>/acc/mean@1 in validation.
set -euxo pipefail

PYTHON=${PYTHON:-python}
export RUN_DIR=${RUN_DIR:-outputs/mixed_1.5b_grpo}
export DATA_DIR=${DATA_DIR:-data/mixed}
export MAX_TURN=${MAX_TURN:-10}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python && ${PYTHON} == python ]]; then
    PYTHON=.venv/bin/python
fi
export PYTHON

# The Sokoban script finds the files and curates nothing.
if [[ ! -f ${DATA_DIR}/train.parquet ]]; then
    "${PYTHON}" -m examples.mixed.make_data --out-dir "${DATA_DIR}" --max-steps "${MAX_TURN}"
fi

exec examples/sokoban/run_qwen2_5-1.5b_1gpu_grpo.sh \
    trainer.project_name=mixed \
    trainer.experiment_name=qwen2_5_1.5b_grpo \
    "$@"
