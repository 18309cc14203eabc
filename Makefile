# Every target sets itself up: all it takes is make and Python >= 3.11.
PYTHON  ?= python3
VENV    ?= .venv
ORACLES ?= .venv-oracles
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed

.PHONY: help setup train test test-slow check bench docs smollm2 oracles
help:           ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "quatrain needs Python >= 3.11, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install, nothing else

train: $(STAMP) ## the quickstart: a small model learns by reinforcement, offline, in minutes
	$(BIN)/quatrain train

test: $(STAMP)  ## the test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10

test-slow: $(STAMP) ## the long proofs
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder --durations=15

check: $(STAMP) ## lint, format, types, import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## seconds per stage of the quickstart's training step, here
	$(BIN)/quatrain bench

docs: $(STAMP)  ## rewrite the pages that are made from the code: docs/config.md, docs/metrics.md
	$(BIN)/python -m quatrain.config.document
	$(BIN)/python -m quatrain.report.catalogue

smollm2: $(STAMP) ## fetch SmolLM2-135M-Instruct (98 MB) into models/
	$(BIN)/python scripts/fetch_smollm2.py

oracles:        ## remake tests/golden/ with torch and transformers, in a venv of its own (gigabytes)
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet torch==2.13.0
	$(ORACLES)/bin/python -m pip install --quiet -c constraints.txt -e '.[gguf]' accelerate sentencepiece
	$(ORACLES)/bin/python scripts/fetch_smollm2.py
	$(ORACLES)/bin/python tests/oracles/make_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_smollm2_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_sentencepiece_golden.py
