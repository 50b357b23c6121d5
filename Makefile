# Each target first makes .venv ready; that takes no time when nothing changed.
# PYTHON chooses the Python of .venv:   make demo PYTHON=python3.12
# PYTEST_ARGS goes to pytest:           make test PYTEST_ARGS="-n 2 -k ring"

PYTHON ?= python3
PYTEST_ARGS ?=
VENV_PYTHON := .venv/bin/python

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu clean

help:
	@echo "make demo      run the demo"
	@echo "make test      run ruff, mypy and the tests that need no GPU"
	@echo "make test-gpu  run the tests that need an NVIDIA GPU"
	@echo "make setup     make .venv ready and stop there"
	@echo "make clean     remove .venv and everything else that was made here"

setup:
	@$(PYTHON) scripts/setup.py

demo: setup
	@echo "==> running the demo"
	@$(VENV_PYTHON) -m tilerelay demo

test: setup
	@echo "==> ruff check"
	@$(VENV_PYTHON) -m ruff check
	@echo "==> ruff format --check"
	@$(VENV_PYTHON) -m ruff format --check
	@echo "==> mypy (the first run takes a minute)"
	@$(VENV_PYTHON) -m mypy
	@echo "==> pytest"
	@$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

# pytest exits with 5 when it collects no test, but with 0 when every test was
# skipped. Both mean that nothing was tested on a GPU, so both fail here.
test-gpu: setup
	@echo "==> pytest on the GPU"
	@$(VENV_PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS) | tee .venv/test-gpu.log
	@grep -Eq '[0-9]+ passed' .venv/test-gpu.log || { echo "test-gpu: no test ran" >&2; exit 1; }

clean:
	@echo "==> removing .venv, builds and caches"
	@rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
