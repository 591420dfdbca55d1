# Two commands matter: `make demo` and `make test`. Each sets up .venv by itself; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# OpenMP threads of several workers on few cores only get in each other's way.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test check format wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv with pinned dependencies, nothing else

# The stamp is written last: an interrupted set-up starts again. Requirements are pinned exactly.
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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP) ## train a small GPT on 2 stages x 2 pipelines = 4 processes (ARGS="--steps 20")
	$(BIN)/polyrhythm demo $(ARGS)

test: $(STAMP) ## run every test this machine can run (ARGS="-k events")
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP) ## format, lint, types and the import law
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/pure/test_import_law.py

format: $(STAMP) ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(STAMP) ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove .venv, caches and build outputs (run folders stay)
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
