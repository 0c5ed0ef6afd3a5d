# setup | demo | test | check | bench | soak: nothing else to know. `make` alone prints them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
COVERAGE_FLOOR := 85
SOAK_SECONDS ?= 60
TESTS := $(BIN)/python -m pytest -n logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links pyproject.toml

# Tests start hundreds of processes: without bytecode on disk, each one compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage check bench soak proto pins format

help:  ## print the targets
	@awk -F ':[^#]*## ' '/^[a-z]+:[^#]*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## create .venv from the pins; a second run returns at once
	@PYTHON="$(PYTHON)" .ci/setup

demo: setup  ## run a trained MoE model on an arena smaller than its experts (KEEP=1: leave it running)
	@$(BIN)/tierd demo $(if $(KEEP),--keep-running)

test: setup  ## run the tests; prints the slowest twenty
	@$(TESTS)

coverage: setup  ## run the tests and count the lines that they reach, which takes twice the time
	@$(TESTS) --cov --cov-report= --cov-fail-under=$(COVERAGE_FLOOR)

check: setup  ## lint, format, types, import rules, protocol, generated stubs, pins
	@.ci/check

bench: setup  ## measure the main job on real geometries
	@$(BIN)/python tests/bench/main_job.py

soak: setup  ## run the stress tests for long, and let hypothesis explore (half an hour)
	@$(BIN)/python -m pytest -m stress --soak-seconds=$(SOAK_SECONDS) --timeout=600
	@$(BIN)/python -m pytest -m soak --timeout=1200
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=explore --timeout=600

proto: setup  ## generate tierd/api from proto/
	@.ci/generate .

pins: setup  ## compile requirements/ from pyproject.toml (needs a package index)
	@$(COMPILE) -o requirements/run.txt
	@$(COMPILE) --extra test --extra bench -o requirements/dev.txt
	@$(COMPILE) --extra train -o requirements/train.txt
	@$(COMPILE) --extra oracle -o requirements/oracle.txt
	@$(COMPILE) --extra torch -o requirements/torch.txt
	@$(COMPILE) --extra ray -o requirements/ray.txt

format: setup  ## sort imports and format the code
	@$(BIN)/ruff check --quiet --select I --fix . && $(BIN)/ruff format .
