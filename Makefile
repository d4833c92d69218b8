# Every target does its own set-up; all it needs is make and Python 3.11 or later.
# Another Python: make PYTHON=python3.12 test

PYTHON ?= python3
# Processes that run tests: two per core of CI, because tests of servers wait more than they work.
JOBS ?= 4
VENV := .venv
BIN := $(VENV)/bin

# Stamps, inside the environment so that they vanish with it. Each is made again when
# pyproject.toml changes. `ready` is enough to run headgate, `ready-dev` to work on it.
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev
READY_BENCH := $(VENV)/.ready-bench

# Byte code is kept even where the environment says otherwise: the tests start about a thousand
# processes, and without it each compiles again whatever it imports.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# No test needs the threads of BLAS, which every process that imports numpy would start.
PYTEST := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo compare test test-full hostile check bench bench-live compile wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | \
	while IFS='|' read -r target what; do printf '%-16s %s\n' "$$target" "$$what"; done

setup: $(READY_DEV)  ## put everything that developing needs into .venv

demo: $(READY)  ## profile, plan and serve a recommender, and spill its bursts to functions
	$(BIN)/headgate demo hybrid --report out/demo

compare: $(READY)  ## compare seven policies on one workload and write a report
	$(BIN)/headgate compare examples/kaas.yaml \
	  --policies round_robin,balance,srtf,mlfq,exclusive,affinity,headgate --report out/compare

test: $(READY_DEV)  ## the tests that CI runs
	$(PYTEST) -m "not slow"

test-full: $(READY_DEV)  ## every test there is, the slow ones too
	$(PYTEST)

hostile: $(READY_DEV)  ## what attacks on a real server cost everybody else, in figures
	$(BIN)/python tests/hostile/figures.py

check: $(READY_DEV)  ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

bench: $(READY_BENCH)  ## the speed of the simulator, beside that of others
	-$(BIN)/python tools/compile.py  # without a C compiler, the compiled build stays out of it
	$(BIN)/headgate bench sim

bench-live: $(READY_BENCH)  ## how fast it serves, beside other servers (a quarter of an hour, and several GB)
	$(BIN)/headgate bench live

compile: $(READY_DEV)  ## the compiled build, in build/compiled (needs a C compiler)
	$(BIN)/python tools/compile.py

wheel: $(READY_DEV)  ## the compiled build as a wheel, in dist (needs a C compiler)
	$(BIN)/python tools/wheel.py

clean:  ## remove whatever was made here, .venv included
	rm -rf $(VENV) build dist out src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Headgate needs Python 3.11 or later: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[report,onnx,functions]'
	@touch $@

$(READY_DEV): pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[dev]'
	@touch $(READY) $@

$(READY_BENCH): pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[compile,bench]'
	@touch $@
