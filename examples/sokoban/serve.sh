#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Serve Sokoban at http://127.0.0.1:8000; options go through, e.g. `examples/sokoban/serve.sh --port 8001`.
set -euo pipefail

PYTHON=${PYTHON:-python}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python && ${PYTHON} == python ]]; then
    PYTHON=.venv/bin/python
fi
exec "${PYTHON}" -m recipe.agent_env.env_service examples.sokoban.sokoban_env:SokobanEnv --name sokoban-v0 "$@"
