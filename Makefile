# SPDX-License-Identifier: Apache-2.0
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
SERVE_ARGS ?=
TEST_ARGS ?=
# Processes that run tests; one of them runs all tests that start an engine.
TEST_JOBS ?= 2

.PHONY: help setup serve test lint types docs wheels lock clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

setup: ## Make or update the environment in .venv
	@$(PYTHON) -m tools.bootstrap

serve: setup ## Serve Gemma 3 270M with the hybrid manager (SERVE_ARGS="--port 8001" and so on)
	@$(VENV_PYTHON) -m tools.serve $(SERVE_ARGS)

test: setup ## Run the tests (TEST_ARGS="-k sliding" and so on)
	@$(VENV_PYTHON) -m pytest -n $(TEST_JOBS) $(TEST_ARGS)

lint: setup ## Check style and formatting
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror csrc/*/*.cpp csrc/*/*.h

types: setup ## Check types
	@$(VENV_PYTHON) -m mypy
	@$(VENV_PYTHON) -m mypy.stubtest --mypy-config-file tools/stubtest.ini \
		--allowlist tools/stubtest_allowlist.txt --ignore-disjoint-bases vllm.v1.core.hybrid._core

docs: setup ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

wheels: ## Build the wheels into dist/, for Python 3.11 and for 3.12 and newer
	@$(PYTHON) -m tools.wheels

lock: ## Resolve requirements/cpu.in anew; takes minutes
	@$(PYTHON) -m tools.lock

clean: ## Remove build results, but not .venv or converted models
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f vllm/v1/core/hybrid/_core.*.so
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
