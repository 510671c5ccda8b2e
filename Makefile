# Licensed under the Apache License, Version 2.0 (see LICENSE).
# `make help` lists the targets. Each makes .venv first if it is missing or older than its lock.

SHELL := /bin/bash
PY := .venv/bin/python
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-learn test test-full chaos test-unit test-e2e lint format docs bench bench-quick lock \
	check-gpu-lock mutants build clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv for a machine without a GPU (PYTHON=python3.12 picks another Python)
	@bash scripts/setup_env.sh

demo: setup  ## train a small agent on Sokoban on the CPU; ends in outputs/demo/summary.json (ALGO=grpo for GRPO)
	$(PY) -m examples.sokoban.demo $(if $(ALGO),--algo $(ALGO))

demo-learn: setup  ## the same with as many steps as it takes to see it learn (SEED=2 for another start)
	$(PY) -m examples.sokoban.demo --learn $(if $(ALGO),--algo $(ALGO)) $(if $(SEED),--seed $(SEED))

test: setup  ## all tests; the end-to-end ones last
	$(PY) -m pytest -m "not e2e and not full"
	$(PY) -m pytest -m e2e

test-full: setup  ## what make test leaves out: more runs of the main job, a short chaos run, the page in Chromium (installs it)
	$(PY) -m pytest -m full
	$(PY) -m tests.chaos --episodes 300
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }
	$(PY) -m pytest tests/tools/browser/page_in_chromium.py

chaos: setup  ## 1,000 episodes against services that are being broken, each row checked; ends in outputs/chaos/report.json
	$(PY) -m tests.chaos --episodes 1000

test-unit: setup  ## the tests that start no Ray and no vLLM
	$(PY) -m pytest -m "not e2e and not full"

test-e2e: setup  ## the end-to-end tests: Ray, vLLM and a live service
	$(PY) -m pytest -m e2e

lint: setup  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup  ## write docs/configuration.md from the comments of the yaml files
	$(PY) scripts/config_reference.py

bench: setup  ## all benchmarks, then table and plot of docs/performance.md (long; wants an idle machine)
	nice -n 10 $(PY) -m benchmarks.run
	$(PY) -m benchmarks.page

bench-quick: setup  ## the benchmarks on small sizes, without the training run
	nice -n 10 $(PY) -m benchmarks.run --quick

lock: setup  ## resolve requirements/*.in into requirements/*.txt (needs PyPI; UPGRADE=1 moves every pin)
	$(PY) scripts/lock.py $(if $(UPGRADE),--upgrade) cpu gpu

check-gpu-lock: setup  ## resolve the GPU requirements again without installing, and compare (needs PyPI)
	$(PY) scripts/lock.py --check gpu

mutants: setup  ## plant faults in the prompt styles and count how many the tests catch (hours; ONLY=sample: every fifth)
	$(PY) -m pip install -q --no-deps -r requirements/mutants.txt
	nice $(PY) scripts/mutants.py $(if $(ONLY),--$(ONLY))

build: setup  ## wheel and source distribution into dist/
	$(PY) -m hatchling build

clean:  ## remove outputs, builds and caches
	rm -rf outputs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean  ## and .venv
	rm -rf .venv
