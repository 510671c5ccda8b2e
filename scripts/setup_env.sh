#!/usr/bin/env bash
# Licensed under the Apache License, Version 2.0 (see LICENSE).
# Makes .venv for a machine without a GPU, exactly as requirements/cpu.txt pins it. Does nothing when .venv is up to date.
# Owns the order: torch's CPU build first, then the lock without dependency resolution, so that no resolver brings
# a second torch or a torchvision that does not load next to the first.
#   PYTHON=python3.12 scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
TORCH=torch==2.13.0+cpu
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
STAMP=$VENV/.setup-stamp

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.10, 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    # 3.11 first: it is the one that the tests run on.
    for candidate in python3.11 python3 python3.12 python3.10; do
        if is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "found no Python 3.10, 3.11 or 3.12; install one or name it: make setup PYTHON=/path/to/python3.11"
}

python_version() { "$1" -c 'import platform; print(platform.python_version())'; }

wanted_stamp() {
    cat requirements/cpu.txt pyproject.toml scripts/setup_env.sh | sha256sum | cut -d' ' -f1
    # An environment that was moved or copied does not work.
    pwd
}

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp)" ] && is_supported "$VENV/bin/python"; then
    if [ -z "${PYTHON:-}" ] || [ "$(python_version "$PYTHON")" = "$(python_version "$VENV/bin/python")" ]; then
        exit 0
    fi
fi

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the CPU environment is pinned for Linux x86_64, this is $(uname -sm)"

if is_supported "$VENV/bin/python"; then
    if [ -n "${PYTHON:-}" ] && [ "$(python_version "$PYTHON")" != "$(python_version "$VENV/bin/python")" ]; then
        fail "$VENV holds Python $(python_version "$VENV/bin/python"), PYTHON=$PYTHON is another; run 'make distclean' first"
    fi
    rm -f "$STAMP"
    say "bringing $VENV (Python $(python_version "$VENV/bin/python")) up to date with requirements/cpu.txt"
else
    python=$(find_python)
    rm -rf "$VENV"
    say "making $VENV with Python $(python_version "$python"); 4 GB on disk, takes 5 to 10 minutes"
    "$python" -m venv "$VENV" || fail "'$python -m venv' failed; Debian and Ubuntu keep it in the package python3-venv"
fi

started=$SECONDS
elapsed() { echo "$((SECONDS - started)) s"; }
install() { "$VENV/bin/python" -m pip install -qq --no-deps --retries 6 --no-input --disable-pip-version-check "$@"; }

say "1/4 $TORCH"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! install "$TORCH" 2>"$log"; then
    say "    not among pip's configured sources, asking PyTorch's CPU index"
    install --index-url "$TORCH_CPU_INDEX" "$TORCH" ||
        { cat "$log" >&2; fail "could not install $TORCH from pip's sources nor from $TORCH_CPU_INDEX; see above"; }
fi

say "2/4 the $(grep -c '^[a-z].*==' requirements/cpu.txt) pins of requirements/cpu.txt ($(elapsed))"
# One package ships as source only and is built with the pinned setuptools.
install "$(grep -o '^setuptools==[^ ]*' requirements/cpu.txt)"
install --no-build-isolation --only-binary :all: --no-binary antlr4-python3-runtime -r requirements/cpu.txt

say "3/4 this project, editable ($(elapsed))"
install --no-build-isolation -e .

say "4/4 checks ($(elapsed))"
"$VENV/bin/python" -m recipe.agent_env.platform_cpu.vllm_metadata
"$VENV/bin/python" -c 'import torch; assert torch.version.cuda is None, f"torch {torch.__version__} is not a CPU build"'

wanted_stamp >"$STAMP"
say "done in $(elapsed)"
