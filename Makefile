# Two commands on a fresh machine (Debian, Python, a C++ compiler): `make demo` and `make test`.
# All files go to $(VENV) and build/ in this folder.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned: without a version, pip may choose a build with gigabytes of CUDA packages.
TORCH ?= torch==2.13.0
# Passed to pip, e.g. an index of CPU wheels: make setup PIP_FLAGS="--extra-index-url ..."
PIP_FLAGS ?=
DEEPSPEED ?= deepspeed==0.19.8
DEMO_FLAGS ?=
# tests/distributed runs beside the other tests (tests/conftest.py).
TEST_FLAGS ?= -n 2
# Test modules stay compiled for the next run, which takes each worker seconds.
export PYTHONDONTWRITEBYTECODE :=
CUDA_BUILD := build/cuda-check

# Compiling all modules of all dependencies takes two minutes. Python compiles those that are used.
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install --no-compile $(PIP_FLAGS)
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f)
.DEFAULT_GOAL := help

.PHONY: help
help: ## List these commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	  | awk -F '\t' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: setup
setup: $(VENV)/.poplar-built ## Make .venv, install dependencies and build; only if something changed

# With CUDA devices, keep the installed torch: it works with the driver, and another build might not.
$(VENV)/.poplar-dependencies: pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
	  if nvidia-smi -L 2>/dev/null | grep -q GPU \
	      && $(PYTHON) -c 'import torch, sys; sys.exit(not torch.version.cuda)' 2>/dev/null; then \
	    echo "setup: CUDA devices found, keeping the torch of $$($(PYTHON) -c 'import sys; print(sys.executable)')"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else \
	    $(PYTHON) -m venv $(VENV); \
	  fi; \
	fi
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  echo "setup: installing $(TORCH)"; $(PIP) '$(TORCH)'; \
	fi
	@echo "setup: installing what the build and the tests need"
	@$(PIP) 'scikit-build-core>=0.11' 'pybind11>=2.13' cmake ninja
	@touch $@

$(VENV)/.poplar-built: $(VENV)/.poplar-dependencies pyproject.toml $(NATIVE_SOURCES)
	@$(BIN)/python -c 'import os, sys, sysconfig as s; sys.exit(0 if os.path.exists(os.path.join(s.get_path("include"), "Python.h")) \
	  else "setup: the headers of Python are missing; on Debian: apt install python3-dev")'
	@command -v $${CXX:-c++} >/dev/null || { echo "setup: no C++ compiler; on Debian: apt install g++"; exit 1; }
	@echo "setup: building"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(BIN)/python -c 'import poplar.optimizer; from poplar import ops; print("setup:", ops.describe())'
	@touch $@

.PHONY: test
test: setup ## Run the tests that every change has to pass: a representative subset, with a part of the slow ones
	$(BIN)/python -m pytest -q $(TEST_FLAGS)

.PHONY: test-all
test-all: setup ## Run all tests: full parameter products, long random runs, a fresh installation
	$(BIN)/python -m pytest -q --full $(TEST_FLAGS)

# An environment per version, so that .venv stays as it is. With CUDA builds of torch it takes several GB.
COMPAT := build/compat/$(subst /,_,$(TORCH))

.PHONY: compat
compat: ## Run the tests in an environment of its own with another PyTorch: make compat TORCH=torch==2.10.0 (oldest) or TORCH=torch==2.14.1 (newest)
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip --disable-pip-version-check -q install $(PIP_FLAGS) '$(TORCH)'
	$(COMPAT)/bin/python -m pip --disable-pip-version-check -q install $(PIP_FLAGS) -C build-dir=$(COMPAT)/cmake -e '.[dev]' '$(TORCH)'
	$(COMPAT)/bin/python -c 'import torch; from poplar import ops; print("torch", torch.__version__, ops.describe())'
	$(COMPAT)/bin/python -m pytest -q -p no:cacheprovider $(TEST_FLAGS)

# torch's libraries are found in the torch that is imported, so they stay out of the wheel.
WHEELS := dist$(if $(CUDA),/cuda)
WHEEL_BUILD := build/wheel$(if $(CUDA),-cuda)
NOT_IN_WHEEL := libtorch.so libtorch_cpu.so libtorch_cuda.so libc10.so libc10_cuda.so

.PHONY: wheel
wheel: setup ## Build a Linux wheel into dist/ that installs without a compiler; with CUDA operators (needs nvcc): make wheel CUDA=1
	@[ -z "$(CUDA)" ] || $(BIN)/python -c 'import sys, torch; torch.version.cuda or \
	  sys.exit(f"wheel: CUDA=1 needs a CUDA build of torch, found {torch.__version__}")'
	rm -rf $(WHEEL_BUILD)/unchecked
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip --disable-pip-version-check -q wheel . --no-deps \
	  --no-build-isolation -w $(WHEEL_BUILD)/unchecked -C build-dir=$(WHEEL_BUILD)/cmake \
	  -C cmake.define.POPLAR_CPU_OPS=ON -C cmake.define.POPLAR_CUDA=$(if $(CUDA),ON,OFF)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair $(NOT_IN_WHEEL:%=--exclude %) \
	  -w $(WHEELS) $(WHEEL_BUILD)/unchecked/*.whl
	@for made in $(WHEELS)/*.whl; do $(BIN)/python -m auditwheel show "$$made" || exit 1; done

.PHONY: demo
demo: setup ## Train a Llama on four CPU ranks of unequal speed: an even plan against a planned one
	$(BIN)/python examples/demo.py $(DEMO_FLAGS)

.PHONY: docs
docs: setup ## Build the documentation site into build/site; fails on any warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: peers
peers: $(VENV)/.poplar-peers ## Install what benchmarks/train.py compares with: DeepSpeed (DDP and FSDP2 come with torch)

# No operators are built, and the installed torch must not be replaced.
$(VENV)/.poplar-peers: $(VENV)/.poplar-built
	@echo "peers: installing $(DEEPSPEED)"
	@$(PIP) setuptools wheel
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(VENV)/torch.txt
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation -c $(VENV)/torch.txt '$(DEEPSPEED)'
	@touch $@

.PHONY: lint
lint: setup ## Check style and types: ruff, mypy (strict, on poplar/), clang-format; and which rows are called current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/integration/test_saved_rows.py
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \
	  | xargs $(BIN)/clang-format --dry-run -Werror

.PHONY: format
format: setup ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \
	  | xargs $(BIN)/clang-format -i

.PHONY: cuda-check
cuda-check: setup ## Compile the CUDA operators for every architecture of nvcc (needs nvcc, no GPU)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B $(CUDA_BUILD) -DPOPLAR_CUDA=ON \
	  -DCMAKE_CUDA_ARCHITECTURES=all -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build $(CUDA_BUILD) --target poplar_ops_cuda

# On a machine with a GPU, `$(PYTHON)` needs a CUDA build of torch and the packages that
# `benchmarks/gpu.py --help` lists; nothing is downloaded. Without make, run that script.
GPU_OUT ?= gpu
MINUTES ?= 10
GPU_FLAGS ?=
GPU_RUN = benchmarks/gpu.py --minutes $(MINUTES) --output $(GPU_OUT) $(GPU_FLAGS)

.PHONY: gpu
gpu: ## Build for this GPU, then check and measure what needs one, in MINUTES (10); logs and rows in GPU_OUT/gpu.tar.gz. Without a GPU: the same parts on the CPU
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then $(PYTHON) $(GPU_RUN); \
	  else $(MAKE) -s setup && $(BIN)/python $(GPU_RUN) --device cpu; fi

.PHONY: results
results: setup ## Measure again all saved rows that are older than the code they measure; hours, and a run that was stopped can be repeated
	$(BIN)/python benchmarks/remeasure.py

.PHONY: clean
clean: ## Remove build outputs and .venv
	rm -rf build dist $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
