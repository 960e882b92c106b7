# From a fresh clone, with Python 3.11-3.13, a C++ compiler and make on the machine:
#   make demo    make test
# On Linux the public index's torch brings CUDA libraries; the smaller CPU build:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := primtorch aotautograd dynamo inductor distributed compile
SOURCES := $(foreach package,$(PACKAGES),packages/$(package)/src)
CPP := $(wildcard packages/*/cpp/*) $(wildcard packages/*/hatch_build.py)
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test slow check bench docs clean

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## make the virtual environment and install the six packages into it, editable

$(VENV)/.dependencies: requirements-dev.txt constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.ready: $(VENV)/.dependencies $(CPP) $(wildcard packages/*/pyproject.toml)
	$(PIP) --no-build-isolation $(foreach package,$(PACKAGES),-e packages/$(package))
	@touch $@

demo: $(VENV)/.ready ## train a small ViT eager and compiled, generate with a small GPT-2, write a report
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready ## run every package's tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow"

slow: $(VENV)/.ready ## run the tests that take long: the whole operator database
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m slow

check: $(VENV)/.ready ## ruff, mypy --strict, import contracts, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check/contracts.py
	$(BIN)/mypy $(SOURCES)
	$(BIN)/python tools/docs.py --check

bench: $(VENV)/.ready ## eager, torch.compile and this stack side by side
	$(BIN)/python tools/bench/models.py

docs: $(VENV)/.ready ## write the generated pages of docs/ anew
	$(BIN)/python tools/docs.py

clean: ## remove the environment and what was built
	rm -rf $(VENV) packages/*/build packages/*/dist packages/*/src/*/*.so demo_report
