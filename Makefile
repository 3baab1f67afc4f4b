# `make help` lists the targets. `train`, `test` and the others set the environment up by themselves.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
ARGS ?=
export PYTHON

RUN := .venv/bin/python
READY := .venv/.nvfp4_train_setup
# Tools run as modules, so that they are found wherever the interpreter finds them.
# One thread per test process: several processes share the cores, and threads that spin make small steps many times slower.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# As many processes as logical cores, 8 at most. A file stays in one process: its tests share what a module fixture made.
# Files start in the order of tests/conftest.py, longest first, not in that of their number of tests.
PYTEST := $(TEST_ENV) $(RUN) -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help setup train test test-slow check format-check lint types imports spelling configs bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  ARGS='...' is passed on, for example: make train ARGS='run.name=mine recipe=bf16'"

$(READY): pyproject.toml docker/constraints.txt scripts/setup.sh
	@scripts/setup.sh

setup: $(READY) ## create .venv and install the package with what the demo and the tests need

train: $(READY) ## train the demo: a small hybrid model in NVFP4 on real text, about 5 minutes on 2 cores
	@$(RUN) scripts/pretrain.py experiment=demo $(ARGS)

test: $(READY) ## run the tests (CPU)
	@$(PYTEST) $(ARGS)

test-slow: $(READY) ## run the tests and those marked slow (CPU)
	@$(PYTEST) -m 'not gpu and not blackwell and not multi_gpu' $(ARGS)

check: format-check lint types imports spelling configs ## format, lint, types, imports, spelling, configs

format-check: $(READY)
	@$(RUN) -m ruff format --check .

lint: $(READY)
	@$(RUN) -m ruff check .

types: $(READY)
	@$(RUN) -m mypy

imports: $(READY)
	@$(RUN) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-cache

spelling: $(READY)
	@$(RUN) -m codespell_lib

configs: $(READY)
	@$(RUN) -m nvfp4_train.config.check

bench: $(READY) ## run every benchmark, results in benchmarks/results/*.json; ARGS=--quick: whether they run, 2 minutes
	@mkdir -p benchmarks/results
	@for script in $(filter-out benchmarks/race.py, $(wildcard benchmarks/*.py)); do \
	    echo "$$script"; \
	    $(RUN) "$$script" --json "benchmarks/results/$$(basename "$$script" .py).json" $(ARGS); \
	done

format: $(READY) ## format the code and fix what ruff can fix
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

clean: ## remove caches and build products; .venv and runs stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache benchmarks/results
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
