# The commands of the house. Each does its own set-up: `make train` on a fresh machine needs python3 (3.10 or
# newer, with venv), a C and a C++ compiler and make. Nothing here needs root.
#
#   make train PIP_ARGS="--index-url URL"     another package index, for example one with a CPU-only torch
#   make train TRAIN_ARGS="--steps 20"        more flags of `zinf train` (they win over ours)
#   make test TEST_ARGS="-k planner"          more flags of pytest

PYTHON     ?= python3
VENV       ?= .venv
RUN_DIR    ?= .zinf-run
PIP_ARGS   ?=
TRAIN_ARGS ?=
TEST_ARGS  ?=

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --disable-pip-version-check -c ci/constraints.txt $(PIP_ARGS)
FAST  := not slow and not root and not peers

PACKAGES := deepnvme cpu_adam zero3 zinf
# Python sources are used where they lie; only these make a new installation necessary.
BUILD_INPUTS := ci/constraints.txt $(wildcard packages/*/pyproject.toml packages/*/CMakeLists.txt \
  packages/*/build_ffi.py packages/*/setup.py packages/deepnvme/cpp/*.[ch]pp packages/cpu_adam/csrc/*.[ch])

# So small a model would fit into memory whole: with budgets far below its 573 MB of states it streams as a large one.
BUDGETS := --host-memory 256MiB --device-memory 32MiB

INSTALLED      := $(VENV)/.installed
LINT_INSTALLED := $(VENV)/.lint-installed

.PHONY: train test test-all lint bench sanitize setup clean
.DELETE_ON_ERROR:

train: $(INSTALLED)
	$(BIN)/zinf train --out $(RUN_DIR) $(BUDGETS) $(TRAIN_ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(FAST)" $(TEST_ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest --durations=20 $(TEST_ARGS)

lint: $(LINT_INSTALLED)
	$(BIN)/python -m ruff check .
	$(foreach package,$(PACKAGES),$(BIN)/python -m mypy packages/$(package)/src &&) true
	$(BIN)/python ci/check_versions.py
	$(BIN)/python ci/check_paper_map.py

bench: $(INSTALLED)
	mkdir -p $(RUN_DIR)
	$(BIN)/deepnvme-bench run $(RUN_DIR) --size 512MiB --seconds 2 --json $(RUN_DIR)/deepnvme-bench.json
	$(BIN)/python -m cpu_adam.bench --json $(RUN_DIR)/cpu_adam-bench.json
	$(BIN)/python packages/zinf/benchmarks/bytes_per_step.py --nvme $(RUN_DIR) --json $(RUN_DIR)/zinf-bytes.json

sanitize: $(INSTALLED)
	$(PIP) cmake ninja
	PATH="$(abspath $(BIN)):$$PATH" packages/deepnvme/cpp/tests/sanitize.sh
	$(BIN)/python -m pytest packages/cpu_adam/tests/test_c_core.py -k sanitizers

setup: $(INSTALLED)

clean:
	rm -rf $(VENV) $(RUN_DIR) packages/*/build packages/*/dist packages/*/src/*.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; choose one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made: on Debian or Ubuntu install python3-venv."; exit 1; }

$(INSTALLED): $(BUILD_INPUTS) | $(BIN)/python
	$(PIP) $(foreach package,$(PACKAGES),-e packages/$(package)) pytest pytest-timeout hypothesis transformers accelerate jax optax
	touch $@

$(LINT_INSTALLED): $(INSTALLED)
	$(PIP) ruff mypy
	touch $@
