# Everything runs in an environment of its own, .venv/py<version>, made on first use and used again after.
#
#   make test PYTHON=python3.13     with another interpreter (a name or a path), in its own environment
#   make test ARGS="-k donation"    with more arguments for pytest
#   make test WORKERS=4             in more processes

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test faults lint bench versions interpreter clean

WORKERS ?= 2
ARGS ?=

# `make help` and `make clean` need no Python.
ifneq ($(filter-out help clean,$(MAKECMDGOALS)),)

# Without PYTHON: python3, or a newer one where python3 is too old. A command may exist and still not run
# (pyenv's shims), so each is asked.
ifndef PYTHON
PYTHON := $(firstword $(shell for python in python3 python3.13 python3.12 python3.11; do \
    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python"; done) python3)
endif

# The shell does not always expand `~` behind `PYTHON=`.
INTERPRETER := $(patsubst ~/%,$(HOME)/%,$(PYTHON))
VERSION := $(shell "$(INTERPRETER)" -c 'import sys; print("%d.%d" % sys.version_info[:2] + " old" * (sys.version_info < (3, 11)))' 2>/dev/null)

ifeq ($(VERSION),)
$(error cannot run PYTHON=$(PYTHON): autoguard needs CPython 3.11 or newer)
endif
ifneq ($(word 2,$(VERSION)),)
$(error PYTHON=$(PYTHON) is Python $(firstword $(VERSION)): autoguard needs CPython 3.11 or newer)
endif

VENV := .venv/py$(VERSION)
BIN := $(VENV)/bin
# The stamp is a copy of the pyproject.toml that the environment was made from.
STAMP := $(VENV)/pyproject.toml
# Two runs of make at once make an environment one after the other, where the system has flock.
LOCK := $(if $(LOCKED),,$(if $(shell command -v flock),flock $(VENV).lock))

endif

help:
	@echo "make demo     train the guarded examples and sabotage them"
	@echo "make test     run the tests              (PYTHON=, ARGS=, WORKERS=)"
	@echo "make faults   plant faults in every program of the zoo, sweep all library functions (ARGS=\"--seed 1 --fraction 0.1\")"
	@echo "make lint     ruff, pyright, import-linter"
	@echo "make bench    run the benchmarks"
	@echo "make clean    remove environments, caches and build outputs"

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP) versions
	@$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# `make test` takes a small sample of these.
faults: $(STAMP) versions
	@WHOLE_SWEEP=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/sweep
	@$(BIN)/python -m tests.faults $(ARGS)

# Every check runs, whichever fails. pyright would ask a registry for a newer version of itself at each run.
lint: export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
lint: $(STAMP) versions
	@status=0; \
	echo "==> ruff check"; $(BIN)/ruff check || status=1; \
	echo "==> ruff format"; $(BIN)/ruff format --check || status=1; \
	echo "==> pyright"; $(BIN)/pyright --pythonpath $(BIN)/python || status=1; \
	echo "==> import-linter"; $(BIN)/lint-imports --no-logo || status=1; \
	exit $$status

bench: $(STAMP) versions
	@$(BIN)/python -m benchmarks.run $(ARGS)

versions: $(STAMP)
	@$(BIN)/python -c 'import platform; from importlib.metadata import version as v; \
	    print("Python", platform.python_version(), "JAX", v("jax"), "flax", v("flax"), "in $(VENV)", flush=True)'

# For .ci/run: the version that PYTHON stands for.
interpreter:
	@echo $(VERSION)

clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifdef VENV
ifdef LOCK
$(STAMP): pyproject.toml
	@mkdir -p .venv
	@$(LOCK) $(MAKE) --silent --no-print-directory LOCKED=1 $@
else
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || { echo "making $(VENV) (once, some minutes)"; "$(INTERPRETER)" -m venv $(VENV); }
	@cmp -s $< $@ || $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,nnx]'
	@cp $< $@
endif
endif
