#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Serve Sokoban, FrozenLake and Countdown in one process at http://127.0.0.1:8000; options go through.
set -euo pipefail

PYTHON=${PYTHON:-python}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python && ${PYTHON} == python ]]; then
    PYTHON=.venv/bin/python
fi
exec "${PYTHON}" -m recipe.agent_env.env_service \
    sokoban-v0=examples.sokoban.sokoban_env:SokobanEnv \
    frozen_lake-v0=examples.frozen_lake:FrozenLakeEnv \
    countdown-v0=examples.countdown:CountdownEnv \
    "$@"
