# Every command creates what it needs: a virtual environment in .venv, with the versions of constraints.txt.
#   make test ARGS="-x tests/ops"        options for pytest, or for the benchmark
#   make demo PYTHON=python3.13          another Python than python3, when .venv is first made

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS ?=

BIN = $(VENV)/bin
PYTEST = $(BIN)/python -m pytest
# One process for each core; at most four, each of which takes a gigabyte.
SHARED = --numprocesses logical --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-floor test-gpu sanitize lint format check bench bench-gpu clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/has-train  ## train small Mamba-2, Hymba and Hydra models, generate, fill masks: minutes on two CPU cores
	$(BIN)/python scripts/demo.py

test: $(VENV)/has-test  ## run the tests
	$(PYTEST) $(SHARED) $(ARGS)

test-all: $(VENV)/has-test  ## run the slow tests, too
	$(PYTEST) $(SHARED) -m "not gpu" $(ARGS)

test-floor:  ## run the tests on the oldest supported versions, in .venv-floor
	$(MAKE) test VENV=.venv-floor CONSTRAINTS=constraints-floor.txt

# The operators' tests with their tensors on the GPU, and those that are for it alone; most of the time is compilation.
test-gpu: $(VENV)/has-test  ## run the GPU tests; needs a CUDA device
	HF_SSM_TEST_DEVICE=cuda $(PYTEST) --numprocesses 12 --dist worksteal -m "not slow" -rs tests/gpu tests/ops $(ARGS)

# The package as it is installed, but with the sanitizers in its kernels; `pytest`, not `python -m pytest`, so that the
# sources in this folder do not come first. Leaks are Python's own.
sanitize: $(VENV)/has-test  ## run the operators' tests under AddressSanitizer and UBSan
	HF_SSM_CXXFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g" \
		$(BIN)/python setup.py -q build --build-temp build/sanitize --build-lib build/sanitized
	PYTHONPATH=build/sanitized ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		$(BIN)/pytest tests/ops -k cpu $(ARGS)

lint: $(VENV)/has-dev  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/has-dev  ## format the code and repair what can be repaired automatically
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

check: lint test  ## what every change must pass; needs no GPU

bench: $(VENV)/has-train  ## time our models beside transformers' own on this CPU
	$(BIN)/python scripts/bench_cpu.py $(ARGS)

bench-gpu: $(VENV)/has-train  ## time operators and models beside their peers on this GPU, in less than 8 minutes
	$(BIN)/python scripts/bench_gpu.py $(ARGS)

clean:  ## delete the environments, caches and build products, but not runs/
	rm -rf .venv .venv-floor build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment, and in it a file for each set of extras that has been installed from the present requirements.
# bin/pip comes last when an environment is made, so an interrupted attempt is repeated.

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "hf-ssm needs Python 3.11 or newer; '$(PYTHON)' is older or missing. Try: make PYTHON=/path/to/python3" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/has-%: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/pip
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[$*]' --constraint $(CONSTRAINTS)
	touch $@
