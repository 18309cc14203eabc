# Everything sets itself up: each target needs only make and Python >= 3.11.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup train test test-slow check bench docs oracles smollm2 clean
help:           ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install, nothing else

train: $(STAMP) ## the quickstart: watch a small model learn by reinforcement, offline, in minutes
	$(BIN)/quatrain train

test: $(STAMP)  ## the test suite
	$(BIN)/python -m pytest -n 2

test-slow: $(STAMP) ## the long proofs
	$(BIN)/python -m pytest -m slow

check: $(STAMP) ## lint, format, types, import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
