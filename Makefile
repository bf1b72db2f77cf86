# Everything a newcomer or CI runs; `make help` lists it.
#
# PYTHON=path    the Python to build the environment with; found by itself when not given
# VENV=folder    where the environment is; empty to use PYTHON as it is, installing nothing
# JAX='jax==…'   which JAX goes into the environment; the newest when not given
# EXTRAS=test    an environment for tests without PyTorch; those of kvtorch skip
# JOBS=number    test processes; one for each core, but in an environment of yours, which may have a
#                GPU that several could not share, just one

SHELL := bash
PYTHON ?=
VENV ?= .venv
JAX ?= jax
EXTRAS ?= test-torch
# 425 tests on two busy cores, JAX 0.11.2: 72 s in one process, 63 s in two for 1.1 times the CPU time.
JOBS ?= $(if $(strip $(VENV)),auto)

# A request trace for the demo. When there is none, it generates a workload.
TRACE ?= $(wildcard ../shared/traces/conversation_trace.jsonl)
DEMO_OPTIONS ?= --backend both --scale 32 --pool 128MiB --host-pool 256MiB --verify-every 200 --plot demo.png

ifeq ($(strip $(VENV)),)
python := $(or $(PYTHON),python3)
with =
else
python := $(VENV)/bin/python
with = $(VENV)/.with-$(1)
endif

jobs = $(if $(JOBS),-n $(JOBS) --dist worksteal)

.PHONY: help demo test slow lint format bench gpu-test clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(call with,plot-torch) ## replay a request trace in JAX and torch, compare and verify (TRACE=file)
	@$(python) -m kvjax replay $(TRACE) $(DEMO_OPTIONS)

test: $(call with,$(EXTRAS)) ## every test but the slow ones; GPU tests skip without a GPU
	@$(python) -m pytest -q -m "not slow" $(jobs) $(PYTEST_OPTIONS)

slow: $(call with,$(EXTRAS)) ## the slow tests
	@$(python) -m pytest -q -m slow $(jobs) $(PYTEST_OPTIONS) || test $$? -eq 5 # 5: there are none

lint: $(call with,$(EXTRAS)) ## formatting, lint rules, types
	@$(python) -m ruff format --check .
	@$(python) -m ruff check .
	@$(python) -m pyright --pythonpath $(python)

format: $(call with,$(EXTRAS)) ## rewrite what the formatter and ruff's safe fixes can
	@$(python) -m ruff check --fix --exit-zero .
	@$(python) -m ruff format .

bench: $(call with,bench-cuda-torch) ## GPU figures: each operation against the device's own copy speed
	@$(python) -m benchmarks $(BENCH_OPTIONS)

gpu-test: $(call with,test-cuda-torch) ## the GPU tests (VENV= PYTHON=python3: in an environment you have)
	@$(python) -m pytest -q -m gpu --require=gpu $(PYTEST_OPTIONS)

clean: ## remove the environments and whatever else make made
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist demo.png
	find . -name __pycache__ -prune -exec rm -rf {} +

ifneq ($(strip $(VENV)),)
comma := ,

# One stamp for each set of extras. Installed again when pyproject.toml changes.
$(VENV)/.with-%: pyproject.toml $(VENV)/.created
	@echo "Installing kvjax[$(subst -,$(comma),$*)]; the first time, this downloads a few hundred MB:"
	@set -o pipefail; $(python) -m pip install --disable-pip-version-check --progress-bar off \
	    --editable '.[$(subst -,$(comma),$*)]' '$(JAX)' | \
	    { grep --line-buffered -o 'Downloading [^ ]*whl ([^)]* MB)' || true; }
	@touch $@

$(VENV)/.created:
	@python=$$(.ci/find-python $(PYTHON)) && echo "Setting up $(VENV) with $$python" && \
	    "$$python" -m venv --clear $(VENV)
	@touch $@
endif
