# From a fresh clone, with Python 3.11-3.13, a C++ compiler and make on the machine:
#   make demo    make test
# On Linux the public index's torch brings CUDA libraries; the smaller CPU build:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
# With another supported torch (packages/primtorch/src/primtorch/supported.py), in an environment of its own:
#   make test TORCH=2.14.1
# With kernels that use several threads, and ATen's for other processors:
#   make test OMP_NUM_THREADS=16
#   make test ATEN_CPU_CAPABILITY=default
# With one in three cases of each test that has many, drawn anew in each run:
#   make test SHARE=3

PYTHON ?= python3
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(PINNED)
TORCH_INDEX ?=
JOBS ?= 2
SHARE ?= 1
# Tests start hundreds of processes, each of which would compile the packages' five hundred files anew.
unexport PYTHONDONTWRITEBYTECODE
OMP_NUM_THREADS ?= 1
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
PACKAGES := primtorch aotautograd dynamo inductor distributed compile
SOURCES := $(foreach package,$(PACKAGES),packages/$(package)/src)
CPP := $(wildcard packages/*/cpp/*) $(wildcard packages/*/src/*/include/*/*) packages/primtorch/src/primtorch/building.py
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt

.PHONY: help setup demo demo-distributed test smoke warm slow protocols matrix check faults resources bench docs site clean

help: ## list the commands
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## make the virtual environment and install the six packages into it, editable

$(VENV)/.dependencies: requirements-dev.txt constraints.txt
	@echo "== 1/4 $(VENV): a virtual environment (seconds)"
	@$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	@echo "== 2/4 torch $(TORCH) (about 0.2 GB to download for the CPU build, 3 GB with CUDA's libraries: a minute or several)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo "== 3/4 what tests, benchmarks and the demo need: requirements-dev.txt (about 0.5 GB: a minute)"
	@$(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.ready: $(VENV)/.dependencies $(CPP) $(wildcard packages/*/pyproject.toml)
	@echo "== 4/4 the six packages; C++ extensions that are not built yet for torch $(TORCH) take a minute or two"
	@$(PIP) --no-build-isolation $(foreach package,$(PACKAGES),-e packages/$(package))
	@$(BIN)/python tools/build_extensions.py
	@touch $@

demo: $(VENV)/.ready ## train a small ViT eager and compiled, generate with a small GPT-2, write a report
	$(BIN)/python examples/demo.py

demo-distributed: $(VENV)/.ready ## train replicas in two processes eager and compiled, show where the backward was cut
	$(BIN)/python examples/demo_distributed.py

test: $(VENV)/.ready ## run every package's tests
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" --share $(SHARE)

smoke: $(VENV)/.ready ## run the whole stack in short, as CI does with the oldest and the newest supported torch
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -m smoke packages/compile/tests packages/primtorch/tests

warm: $(VENV)/.ready ## run a part of the whole-stack tests twice over one cache folder: the second run finds programs
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && for run in cold warm; do \
	  echo "== $$run"; \
	  TEST_CACHE="$$folder" OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
	    -m "warm and not slow" packages/compile/tests || exit 1; \
	done

slow: $(VENV)/.ready ## run the tests that take long: the whole operator database
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -n $(JOBS) -m slow

faults: $(VENV)/.ready ## plant faults into the stages one at a time: what verify and minify say of each
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python packages/compile/tests/planted_faults.py --out docs/results/faults.md

resources: $(VENV)/.ready ## compile the kernels of public models for two GPUs, hold registers and spills to bounds
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python tools/check/gpu_resources.py

protocols: $(VENV)/.ready ## train every public model and 300 random nets by every protocol, beside eager
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python packages/compile/tests/protocol_run.py --out protocols.jsonl

matrix: $(VENV)/.ready ## run every part of the language in every setting on every back end, beside eager
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python packages/compile/tests/feature_matrix_run.py --out matrix.jsonl

check: $(VENV)/.ready ## ruff, mypy --strict, import contracts, versions, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check/contracts.py
	$(BIN)/python tools/check/versions.py
	$(BIN)/mypy $(SOURCES)
	$(BIN)/python tools/docs.py --check

bench: $(VENV)/.ready ## eager, torch.compile and this stack side by side
	$(BIN)/python tools/bench/models.py

$(VENV)/.docs: $(VENV)/.dependencies requirements-docs.txt
	@$(PIP) -r requirements-docs.txt
	@touch $@

docs: $(VENV)/.ready $(VENV)/.docs ## write the generated pages of docs/ anew, and build the site into site/
	$(BIN)/python tools/docs.py
	$(MAKE) site

site: $(VENV)/.docs ## build the site of docs/ into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the environments and what was built
	rm -rf .venv .venv-* packages/*/build packages/*/dist packages/*/src/*/_C/torch-* demo_report site
