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

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
, := ,

.PHONY: help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# ---------------------------------------------------------------- the environment

$(VENV)/.created: scripts/find_python.sh
	rm -rf $(VENV)
	python=$$(scripts/find_python.sh $(PYTHON)) && echo "using $$python" && "$$python" -m venv $(VENV)
	touch $@

# A stamp is newer than what it was installed from, so that a second run installs nothing.
define install
	$(PIP) install -qq -c $(CONSTRAINTS) scikit-build-core nanobind cmake ninja
	PATH="$(abspath $(VENV))/bin:$$PATH" \
	    $(PIP) install -qq -c $(CONSTRAINTS) --no-build-isolation -e '.[$(1)]'
	touch $@
endef

$(VENV)/.demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing megamoe[demo] into $(VENV)"
	$(call install,build$(,)demo)

$(VENV)/.test: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing megamoe[test] into $(VENV)"
	$(call install,test)
	touch $(VENV)/.demo


# The extension again, if a C++ source changed since. The build folder is the one that pip made.
define native
	@PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build \
	    build/editable-$$($(PY) -c 'import sys; print(sys.implementation.cache_tag)') -- --quiet
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
