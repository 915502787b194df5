# `make demo` and `make test` do everything, set-up included, on a machine with Python 3.10 or newer.
#
#   PYTHON=python3.12        the interpreter .venv is made from
#   TORCH_INDEX=<place>      an index address or a folder that has CPU builds of torch (used only where no CUDA device is)
#   MEGATRON=<requirement>   another megatron-core than the one the tests' digits were made with
#   TESTS=tests/test_x.py    what `make test` runs

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo demo-adapters test test-oldest slurm-test slurm-short lint bench bench-data bench-adapters gpu-check clean

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
MEGATRON ?= megatron-core==0.16.1
TESTS ?= tests

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
READY := .venv/ready

# The oldest megatron-core that is supported, in an environment of its own that borrows all else from .venv.
OLDEST := .venv-oldest
OLDEST_READY := $(OLDEST)/ready
OLDEST_TESTS := 2x2x2 or fp16 or virtual or experts or broken

help:
	@echo "make demo        train, kill, resume and compare, bit for bit (3 to 5 minutes on 2 cores)"
	@echo "make demo-adapters  the same with three LoRA adapters in turn on one base"
	@echo "make test        the tests"
	@echo "make test-oldest the heart of them, with the oldest megatron-core that is supported"
	@echo "make slurm-test  all kinds of stops on a real Slurm, started here (25 minutes; root, or Slurm installed)"
	@echo "make slurm-short the three kinds that CI runs (under 3 minutes)"
	@echo "make lint        ruff and mypy"
	@echo "make bench       saving and loading, beside the peers and what this machine allows (25 minutes)"
	@echo "make gpu-check   saves from a CUDA device, on a machine that has one"
	@echo "make bench-data  how long the sampler takes to its first batch"
	@echo "make bench-adapters  32 adapters saved one by one, beside one save of the same bytes"
	@echo "make clean       remove what the others made, .venv included"

demo: $(READY)
	$(BIN)/python cookbook/demo.py

demo-adapters: $(READY)
	$(BIN)/python -W ignore cookbook/demo_adapters.py

# On the CPU everywhere: the tests' ranks outnumber the devices of most machines.
test: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q $(TESTS)

test-oldest: $(OLDEST_READY)
	CUDA_VISIBLE_DEVICES= $(OLDEST)/bin/python -m pytest -q tests/test_exact_resume.py -k '$(OLDEST_TESTS)'

# Both install Slurm where root can, start a cluster for themselves, and leave nothing running.
slurm-test: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.slurm all

# 77: Slurm cannot be had here, and the reason has been said.
slurm-short: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.slurm short || test $$? = 77

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -W ignore benchmarks/bench_adapters.py
	CUDA_VISIBLE_DEVICES= $(BIN)/python benchmarks/bench_store.py

gpu-check: $(READY)
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA device is here: nothing to check")'
	$(BIN)/python -m pytest -q tests/gpu

bench-data: $(READY)
	$(BIN)/python benchmarks/bench_data.py

bench-adapters: $(READY)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -W ignore benchmarks/bench_adapters.py

clean:
	rm -rf .venv $(OLDEST) demo-out demo-adapters-out bench-out build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Made once, and again only when what it installs has changed. A torch that is already in .venv is kept as it is.
$(READY): setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("megaresume needs Python 3.10 or newer, found " + sys.version.split()[0] + ": say make PYTHON=<another>")'
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
	    echo "using the torch in .venv: $$($(BIN)/python -c 'import torch; print(torch.__version__)')"; \
	elif nvidia-smi --list-gpus >/dev/null 2>&1; then \
	    echo "a CUDA device is here: installing $(TORCH)"; \
	    $(PIP) '$(TORCH)'; \
	else \
	    echo "no CUDA device is here: installing $(TORCH), a CPU build where pip can find one"; \
	    $(PIP) '$(TORCH)' $(if $(TORCH_INDEX),$(if $(wildcard $(TORCH_INDEX)),--find-links,--extra-index-url) '$(TORCH_INDEX)'); \
	    $(BIN)/python -c 'import torch; torch.version.cuda and print("this torch is a CUDA build: it runs here on the CPU, but is large; README.md tells how TORCH_INDEX avoids it")'; \
	fi
	@echo "installing megaresume and its tools into .venv"
	$(PIP) '$(MEGATRON)' --editable '.[demo,test,lint]'
	@touch $@

$(OLDEST_READY): $(READY)
	@echo "installing megatron-core 0.14.0 into $(OLDEST)"
	@$(BIN)/python -m venv $(OLDEST)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps 'megatron-core==0.14.0'
	@touch $@
