# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FOLDERS := kernels common kvtransfer prefill decode router simulate lang
TYPES := /tmp/baton-types-$(shell id -u)
# Tests of the modules in pyproject.toml's [tool.coverage.run], which must cover all of their lines and branches.
PURE := $(filter-out %/test_tool_routes.py,$(wildcard tests/common/parsers/test_*.py)) \
  tests/common/kvcache/test_kvcache.py tests/common/kvcache/test_cache_groups.py \
  tests/common/kvcache/test_draft_gaps.py tests/common/kvcache/test_tier_writes.py \
  tests/common/kvcache/test_eviction.py tests/common/scheduler/test_tier_simulation.py \
  tests/common/scheduler/test_scheduling.py tests/common/scheduler/test_admission.py \
  tests/common/scheduler/test_slo_policy.py tests/common/scheduler/test_state_simulation.py \
  tests/kvtransfer/test_group_transfers.py \
  tests/common/test_registry.py tests/common/config/test_rules.py tests/common/tokenizer/test_tokenizer.py \
  tests/common/speculative/test_draft_length.py tests/common/speculative/test_simulated.py \
  tests/kvtransfer/protocol tests/router/policies \
  tests/router/relay/test_pair_states.py tests/router/workers/test_circuit.py \
  tests/router/workers/test_tier_index.py
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Files of tests run in as many processes as there are cores, up to 4. Tests that have a GPU need it alone.
PROCESSES := $(if $(HAS_GPU),,--numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder)

.PHONY: demo test lint docs

# Router, prefill and decode server on this host; asks one question, prints the answer, stops.
demo: $(VENV)/engine
	$(BIN)/launch_cluster --ask "What is the capital of France?"

# Each test runs once: those of PURE under coverage, then all others.
test: $(VENV)/dev $(VENV)/helm
	@failed=; \
	$(BIN)/python -m coverage run -m pytest $(PURE) || failed=1; \
	$(BIN)/python -m coverage report || failed=1; \
	$(BIN)/python -m pytest $(PROCESSES) $(PURE:%=--ignore=%) || failed=1; \
	test -z "$$failed"

# The type checker sees the checkout under the package's name through a link that stands outside of it.
lint: $(VENV)/dev
	$(BIN)/ruff check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES) && ln -s "$(CURDIR)" $(TYPES)/baton
	cd $(TYPES) && $(abspath $(BIN))/mypy --config-file baton/pyproject.toml --cache-dir $(abspath $(VENV))/mypy \
	  $(foreach folder,$(FOLDERS),-p baton.$(folder)) -m baton.launch -m baton.bench -m baton.utils
	@rm -rf $(TYPES)

# Writes the pages that follow from the code, and builds the site into build/site; it loads nothing over the network.
docs: $(VENV)/dev
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# With a GPU the stack that was measured; without one the pinned CPU build of torch: an open range would bring gigabytes
# of CUDA.
ifeq ($(HAS_GPU),yes)
PINS := requirements/cuda.txt
INSTALL := $(BIN)/python -m pip install -q -c $(PINS)
ENGINE := engine,cuda
else
PINS := tests/requirements.txt
INSTALL := $(BIN)/python -m pip install -q -r $(PINS)
ENGINE := engine
endif

$(VENV)/engine: pyproject.toml $(PINS) | $(VENV)/bin/python
	$(INSTALL) -e '.[$(ENGINE)]'
	@touch $@

# Triton's tests run with the measured one where torch names none (its CPU build), else with torch's own.
$(VENV)/dev: pyproject.toml $(PINS) $(VENV)/engine
ifneq ($(HAS_GPU),yes)
	if $(BIN)/python -c "import importlib.metadata as m, sys; sys.exit(any(n.startswith('triton') for n in m.requires('torch')))"; \
	  then $(BIN)/python -m pip install -q --no-deps triton==3.6.0; fi
endif
	$(INSTALL) -e '.[$(ENGINE),otel,k8s,dev,docs]'
	@touch $@

# Where these cannot be had, the tests of charts and overlays that need them are skipped.
$(VENV)/helm: tests/deploy/fetch_tools.py | $(VENV)/dev
	@if $(BIN)/python $< $(BIN); then touch $@; else echo "No helm: tests of the chart are skipped."; fi
