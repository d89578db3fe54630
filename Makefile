# Two commands do all the set-up, in .venv:
#
#   make demo     a small layer over CPU ranks, checked against its oracle
#   make test     every check and test that this machine can run
#
# Variables: PYTHON (an interpreter, instead of the first that works), CONSTRAINTS (/dev/null takes
# the newest release of every dependency), PYTEST_ARGS, DEMO_ARGS.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -m "not gpu"
DEMO_ARGS ?=

# Containers often set it. Without byte code on disk every process compiles torch and transformers
# again, which doubles the time of the demo and of each test that starts processes.
unexport PYTHONDONTWRITEBYTECODE

PY := $(VENV)/bin/python
, := ,

.PHONY: help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# ---------------------------------------------------------------- the environment

$(VENV)/.created: scripts/find_python.sh
	@python=$$(scripts/find_python.sh $(PYTHON)); \
	    echo "making $(VENV) with $$python"; \
	    rm -rf $(VENV); \
	    "$$python" -m venv $(VENV)
	@touch $@

# A stamp is newer than what it was installed from, so that a second run installs nothing.
# --no-compile: byte code of the few modules that are used is made at their first import.
INSTALL := $(PY) -m pip --disable-pip-version-check install -qq --no-compile -c $(CONSTRAINTS)
define install
	@echo "installing megamoe[$(1)] into $(VENV); the first time takes minutes"
	@$(INSTALL) scikit-build-core nanobind cmake ninja
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(INSTALL) --no-build-isolation -e '.[$(1)]'
	@touch $@
endef

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	$(call install,build$(,)demo)

$(VENV)/.test: $(VENV)/.created pyproject.toml constraints.txt
	$(call install,test)
	@touch $(VENV)/.demo

# The extension again, if a C++ source changed since; in the build folder that pip made.
define native
	@export PATH="$(abspath $(VENV))/bin:$$PATH"; \
	    build=build/editable-$$(python -c 'import sys; print(sys.implementation.cache_tag)'); \
	    [ -f "$$build/CMakeCache.txt" ] || $(INSTALL) --no-build-isolation --no-deps -e .; \
	    cmake --build "$$build" -- --quiet
endef

# ---------------------------------------------------------------- what people run

.PHONY: demo
demo: $(VENV)/.demo
	$(native)
	$(VENV)/bin/megamoe demo $(DEMO_ARGS)

.PHONY: test
test: check
	$(PY) -m pytest $(PYTEST_ARGS)

.PHONY: check
check: $(VENV)/.test
	$(native)
	$(PY) scripts/check

.PHONY: dev
dev: $(VENV)/.test
	$(native)

.PHONY: format
format: $(VENV)/.test
	$(PY) scripts/check --fix

.PHONY: clean
clean:
	rm -rf $(VENV) build dist *.egg-info megamoe/_native*.so
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
