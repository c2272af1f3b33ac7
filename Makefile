# Every target creates .venv and installs what it needs on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LAB := $(VENV)/.lab
# Python compiles what it loads, once, which is a small part of what is installed.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
export PYTHONDONTWRITEBYTECODE :=
WORKERS ?= 2
# Each worker has half of the files, and what a file shares is made once; who is done first helps.
# A worker has a core: torch's products on aarch64 would start a thread for each one there is.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
export PYTHONUNBUFFERED := 1

export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help setup reproduce test test-all mutations lint format bench docs clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/' | expand -t 20

setup: $(STAMP)  ## create .venv and install vort with everything it can use

define NEW_VENV
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "vort needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
$(PYTHON) -m venv $(VENV)
endef

$(STAMP): pyproject.toml constraints.txt
	$(NEW_VENV)
	$(INSTALL) torch -e '.[hf,lab,dev]'
	@touch $(LAB) $(STAMP)

# What a reproduction needs, and no more: a third of it all.
$(LAB): pyproject.toml constraints.txt
	$(NEW_VENV)
	$(INSTALL) torch -e '.[lab]'
	@touch $(LAB)

reproduce: $(LAB)  ## redo the paper's claims at laptop size; ends with a table and reports/
	$(BIN)/vort reproduce

test: $(STAMP)  ## the tests that run in minutes on two cores
	$(PYTEST) -m "not slow"

test-all: $(STAMP)  ## every test, the slow ones included
	$(PYTEST)

mutations: $(STAMP)  ## wrong lines put into a copy of the code, one at a time: does a test fail?
	$(BIN)/python tests/mutations.py

lint: $(STAMP)  ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the measured comparisons that this machine can run
	$(BIN)/python benchmarks/retention_cpu.py
	$(BIN)/python benchmarks/local_attention_cpu.py

docs: $(STAMP)  ## build the documentation into site/, strictly
	$(BIN)/mkdocs build --strict

clean:  ## remove what the targets made, except .venv
	rm -rf site reports dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
