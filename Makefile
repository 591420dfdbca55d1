# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# OpenMP threads of several workers on few cores only slow each other down.
export OMP_NUM_THREADS ?= 1
# Without its cache of bytecode every process of a test compiles the package again: 20 s of `make test`.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv baselines demo test test-all check types style structure format wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with pinned dependencies, nothing else

# The stamp is written last: an interrupted set-up starts again. Requirements are pinned exactly. Python compiles the
# tenth of their 15,000 files that is imported; compiling all of them would take more than half of the set-up.
$(STAMP): requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	  echo "  expected: Python 3.11 or newer"; \
	  echo "  fix: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments (no ensurepip)"; \
	  echo "  expected: the venv module with pip"; \
	  echo "  fix: apt-get install python3-venv, or make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

BASELINES := .baselines
PYTHON311 ?= python3.11
# An environment of its own: torchft has wheels for x86-64 and Python 3.11 only.
baselines: $(BASELINES)/.installed ## create .baselines with torchft, which `polyrhythm bench faults` then measures, too

$(BASELINES)/.installed: requirements-baselines.txt
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { \
	  echo "error: this is $$(uname -sm)"; \
	  echo "  expected: Linux x86_64, the only one with wheels of torchft"; \
	  echo "  fix: none is needed: benchmarks run without baselines, and say what they omit"; exit 2; }
	@$(PYTHON311) -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON311) is not a Python 3.11 with the venv module"; \
	  echo "  expected: Python 3.11, the only version with wheels of torchft"; \
	  echo "  fix: make baselines PYTHON311=/path/to/python3.11"; exit 2; }
	$(PYTHON311) -m venv --clear $(BASELINES)
	$(BASELINES)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-baselines.txt
	@touch $@

demo: $(STAMP) ## train a small GPT on 2 stages x 2 pipelines = 4 processes (ARGS="--steps 20")
	$(BIN)/polyrhythm demo $(ARGS)

# Tests marked `alone` measure time: they run one by one, after the others. pytest's status 5 means that ARGS
# selected no test of that half; no test in both halves is an error.
define RUN_TESTS
$(PYTEST) -n 4 -m "not alone $(1)" $(ARGS); first=$$?; \
[ $$first -eq 0 ] || [ $$first -eq 5 ] || exit $$first; \
$(PYTEST) -n 0 -m "alone $(1)" $(ARGS); second=$$?; \
[ $$second -eq 0 ] || { [ $$second -eq 5 ] && [ $$first -eq 0 ]; } || exit $$second
endef

test: $(STAMP) ## run the tests that CI runs (ARGS="-k events")
	$(call RUN_TESTS,and not long)

test-all: $(STAMP) ## run every test this machine can run, with random and more examples
	export HYPOTHESIS_PROFILE=thorough; $(call RUN_TESTS)

check: $(STAMP) ## format, lint, types, the import law and the size of the tree
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types style

types: $(STAMP)
	$(BIN)/mypy

style: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(PYTEST) -q tests/pure/test_import_law.py
	$(BIN)/python tools/structure.py

structure: $(STAMP) ## print size and vocabulary of the tree, and the files a step passes; fail where a bar is missed
	$(BIN)/python tools/structure.py; static=$$?; $(BIN)/python tools/files_passed.py && exit $$static

format: $(STAMP) ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(STAMP) ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove .venv, .baselines, caches and build outputs (run folders stay)
	rm -rf $(VENV) $(BASELINES) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
