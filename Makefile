# Every target installs what it needs into .venv; it requires only make and Python >= 3.11.
PYTHON  ?= python3
VENV    ?= .venv
ORACLES ?= .venv-oracles
BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP   := $(VENV)/.installed
# What runs need, without what development needs: a newcomer waits for half as many packages.
RUNS    := $(VENV)/.installed-to-run

# Set in many images for containers; the processes that tests start, hundreds, would each parse all of src.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup train train-vision test durations test-slow test-browser test-hlo test-vllm test-hubs test-buckets test-tinker test-faults test-dist check types imports bench docs site dist release smollm2 oracles
help:           ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(RUNS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "quatrain needs Python >= 3.11, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[plot,vision]'
	@touch $@

$(STAMP): $(RUNS)
	$(INSTALL) -e '.[dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install quatrain and its development tools

train: $(RUNS)  ## run the quickstart: a small model learns by reinforcement learning, offline, in minutes
	$(BIN)/quatrain train

train-vision: $(RUNS) ## a small model that reads pictures learns from rewards to name colours and to count, in minutes
	$(BIN)/quatrain train configs/shapes.yaml

test: $(STAMP)  ## the test suite
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=10

durations: $(STAMP) ## the test suite, and what each of its files takes into tests/durations.json
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --record-durations

test-slow: $(STAMP) ## the long proofs
	$(INSTALL) -e '.[ray,reasoning-gym]' nbclient ipykernel
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=15 \
		-o faulthandler_timeout=3600 # a fixture of tests/equivalence takes 20 minutes on two cores

test-browser: $(STAMP) ## the run page in Chromium (in Debian: apt install chromium chromium-driver)
	$(INSTALL) 'selenium>=4.30'
	$(BIN)/python -m pytest -m browser tests/browser -rs -p no:hypothesispytest # imports trio, of selenium, which warns

test-hlo: $(STAMP) ## compile for an H100 and a TPU v5e, without either, and check counts (installs 800 MB into .hlo/)
	$(BIN)/python scripts/install_compilers.py
	$(BIN)/python -m pytest -m hlo tests/hlo -rs --durations=5

test-vllm: $(STAMP) ## train with a real vLLM on this CPU (installs 4 GB into .vllm/; needs make smollm2)
	$(BIN)/python scripts/install_vllm.py
	$(BIN)/python -m pytest -m vllm tests/vllm -rs -s --durations=5 -o faulthandler_timeout=3600

test-hubs: $(STAMP) ## real environments of verifiers and openenv, frameworks and agents of others (installs 3.1 GB into .hubs/)
	$(BIN)/python scripts/install_hubs.py
	$(BIN)/python -m pytest -m hubs tests/hubs tests/frameworks -rs --durations=5

test-buckets: $(STAMP) ## data, models, checkpoints and exports in a local S3 server (installs 0.3 GB into .buckets/)
	$(INSTALL) -e '.[buckets]'
	$(PYTHON) -m venv .buckets
	.buckets/bin/python -m pip install --quiet --disable-pip-version-check 'moto[server]==5.2.5'
	$(BIN)/python -m pytest -m buckets tests/buckets -rs -s --durations=5

test-tinker: $(STAMP) ## programs of the real Tinker client and its cookbook's recipes (installs 1.6 GB into .tinker/)
	$(BIN)/python scripts/install_tinker.py
	$(BIN)/python -m pytest -m tinker tests/tinker -rs -s --durations=5

check: $(STAMP) ## run linter, format check, type checker and the check of import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	+@$(MAKE) --no-print-directory -j 2 types imports

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

bench: $(STAMP) ## time the stages of the quickstart's training step on this machine
	$(BIN)/quatrain bench

docs: $(STAMP)  ## regenerate the pages made from the code: docs/config.md, docs/metrics.md
	$(BIN)/python scripts/document.py

# The pages, and what they refer to, in one folder for mkdocs.
SITE := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE Dockerfile docs configs examples launch

site: $(STAMP)  ## build the pages as a site in site/; a link that leads nowhere is an error
	$(INSTALL) -e '.[site]'
	rm -rf build/pages && mkdir -p build/pages && ln -s $(SITE:%=$(CURDIR)/%) build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(STAMP)  ## build wheel and sdist into dist/
	rm -rf dist && $(BIN)/python -m build >/dev/null

test-faults: $(STAMP) ## sow the faults of tests/faults into copies of src, one by one: the quick tests catch all
	$(BIN)/python tests/faults/sow.py

test-dist: dist ## install the wheel alone, with the oldest and with the newest dependencies, and train with it
	$(BIN)/python scripts/try_wheel.py dist/*.whl oldest
	$(BIN)/python scripts/try_wheel.py dist/*.whl newest

# What must pass before a version gets its tag.
GATES ?= check test site dist
release: $(STAMP) ## VERSION=0.1.0: set the version, cut the changelog, check, build, commit and tag; all but the upload
	$(BIN)/python scripts/release.py "$(VERSION)" $(MAKE) $(GATES)

smollm2: $(STAMP) ## download SmolLM2-135M-Instruct (98 MB) into models/
	$(BIN)/python scripts/fetch_smollm2.py

oracles:        ## regenerate tests/golden/ with torch and transformers, in a separate venv (gigabytes)
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet torch==2.13.0
	$(ORACLES)/bin/python -m pip install --quiet -c constraints.txt -e '.[gguf,vision]' accelerate peft pytest sentencepiece trl==1.16.0 datasets
	$(ORACLES)/bin/python scripts/fetch_smollm2.py
	$(ORACLES)/bin/python tests/oracles/make_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_preparation_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_gradient_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_formula_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_score_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_tower_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_seen_greedy_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_trainer_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_tinker_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_smollm2_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_sentencepiece_golden.py
	$(ORACLES)/bin/python tests/oracles/make_judge_goldens.py
	$(ORACLES)/bin/python tests/oracles/make_rope_position_goldens.py
	$(ORACLES)/bin/python tests/oracles/check_adapters.py
	$(ORACLES)/bin/python tests/oracles/check_folders.py
