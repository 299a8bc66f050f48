# `make help` lists the targets.

PYTHON ?= python3
SHARE  ?= 1/1
CASES  ?= 2
MINUTES ?= 30
PROGRAMS ?= 1000
DEVICE ?= cpu
# Two test processes side by side; what trainings share is made once for the tests of a file.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
# What builds the documentation is installed for those who build it.
DOCS_STAMP := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help setup demo soak soak-programs test test-all test-gpu check docs bench bench-gpu release test-versions clean

# Idle OpenMP threads sleep instead of spinning: trainer and agent share the cores of one machine.
demo soak soak-programs test test-all test-gpu bench bench-gpu: export OMP_WAIT_POLICY = passive

help:  ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.x chooses the Python that .venv is made with (3.10 or newer, default python3)."

setup: $(STAMP)  ## Make .venv and install everything into it (only when something changed)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("memckpt needs Python 3.10 or newer, this is " + sys.version.split()[0] + ": set PYTHON=python3.x")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	    echo "setup: making $(VENV) with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv --clear $(VENV); }
	@echo "setup: installing memckpt and its dependencies into $(VENV) (takes minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@$(BIN)/python -m tests.support.late.device
	@touch $@

demo: setup  ## Kill a training run and see it resume
	$(BIN)/python -m examples.demo

test: setup  ## Run the tests, without the slow ones
	$(PYTEST) -m "not slow" --ignore tests/gpu
	$(PYTEST) -m "not slow" tests/gpu

test-all: setup $(DOCS_STAMP)  ## Run the slow tests, too: CASES=2 cases of each, others each day (all: CASES=all)
	$(PYTEST) --share $(SHARE) --cases $(CASES) --ignore tests/gpu
	$(PYTEST) --share $(SHARE) --cases $(CASES) tests/gpu

soak: setup  ## A failure every few seconds, of all kinds: MINUTES=30 SEED=7 (docs/faults.md)
	$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak-programs: setup  ## Generated trainings, killed and compared: PROGRAMS=1000 SEED=7, DEVICE=late on the late device
	$(BIN)/python -m tests.fuzzing.trainings.soak --programs $(PROGRAMS) $(if $(SEED),--seed $(SEED)) --device $(DEVICE)

# No .venv here: whatever Python has torch for the GPU, and the dependencies, will do.
GPU_NEEDS = torch numpy msgspec xxhash zmq cryptography pyeclib fsspec safetensors rich typer
test-gpu:  ## Run tests/gpu on a GPU, with PYTHON as it is (six at a time where it has pytest-xdist)
	@$(PYTHON) benchmarks/gpu/needs.py $(GPU_NEEDS) pytest pytest_timeout hypothesis setuptools
	$(PYTHON) -m pytest tests/gpu --device cuda $$($(PYTHON) -c 'import xdist' 2>/dev/null && printf -- '-n 6')

check: setup  ## Lint, formatting, types, which package may import which, and the engine's size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.project.engine_size

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: setup $(DOCS_STAMP)  ## Build the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --conf-dir docs_site --jobs auto . build/docs

bench: setup  ## Run the benchmarks
	$(BIN)/python -m benchmarks.run_all

bench-gpu:  ## Run benchmarks/gpu on a GPU, with PYTHON as it is
	@$(PYTHON) benchmarks/gpu/needs.py $(GPU_NEEDS)
	$(PYTHON) -m benchmarks.gpu.page_locks
	$(PYTHON) -m benchmarks.gpu

# Tools that nothing else needs, and that are not installed for those who train or develop.
RELEASE_TOOLS := build/tools/.installed
$(RELEASE_TOOLS): constraints.txt
	@$(PYTHON) -m venv --clear build/tools
	@build/tools/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine uv
	@touch $@

release: $(RELEASE_TOOLS)  ## Build dist/ from the last commit, and install and try it as a user would
	build/tools/bin/python -m tests.project.release

test-versions: export OMP_WAIT_POLICY = passive
test-versions: $(RELEASE_TOOLS)  ## Exactness on the oldest and newest versions that are allowed: VERSIONS="--python 3.12"
	build/tools/bin/python -m tests.project.versions $(VERSIONS)

clean:  ## Remove build products and caches (.venv stays)
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
