# make train   everything from a fresh machine to a trained GPT that writes text
# make test    style, types and tests
# make test-system    what needs root: hosts of network namespaces, mpirun, a browser
# make test-interop   our models against those of transformers; installs PyTorch and lm-eval besides
# Each does the set-up first, once, into .venv/. Another Python: make PYTHON=python3.12 train

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make train` shows training, resuming, evaluating and generating; STEPS and MORE are its lengths.
RUN ?= runs/gpt_tiny
STEPS ?= 150
MORE ?= 300
PROMPT ?= def main(

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup setup-interop setup-system train test test-interop test-system lint format types \
  tests clean
# Nothing of the machine's own Python packages gets in.
unexport PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TF_CPP_MIN_LOG_LEVEL ?= 3

help:
	@sed -n 's/^# \(make\)/\1/p' Makefile

# The stamp is newer than whatever the set-up is made from, or the set-up is made again.
STAMP := $(VENV)/.tfbig-ready
setup: $(STAMP)

$(STAMP): setup.py tfbig/install_horovod.py $(wildcard tfbig/horovod_*.py)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { \
	  echo "make: Python 3.10 to 3.13 is needed, $(PYTHON) is not: make PYTHON=python3.12 ..." >&2; exit 2; }
	@{ $(BIN)/python -m pip --version; } >/dev/null 2>&1 || \
	  $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv module: install it, e.g. apt-get install python3-venv" >&2; exit 2; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || test -n "$$CXX" || { \
	  echo "make: no C++ compiler: install one, e.g. apt-get install g++" >&2; exit 2; }
	@{ $(BIN)/python -m pip --version; } >/dev/null 2>&1 || { \
	  echo "make: making $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "make: installing TensorFlow and the other packages into $(VENV)"
	@# The pip of Python 3.10's and Ubuntu 22.04's venv seeks versions that fit for many minutes.
	@$(BIN)/python -m pip install -qq --upgrade 'pip>=24.2'
	@$(BIN)/python -m pip install -qq --editable '.[cpu,test]'
	@$(BIN)/python -m tfbig.install_horovod
	@touch $@

# Two processes train and stop; the same command with more steps goes on where they stopped.
train: $(STAMP)
	$(BIN)/python -m tfbig.prepare
	$(BIN)/horovodrun -np 2 $(BIN)/python -m tfbig.train --strategy=horovod --steps=$(STEPS)
	$(BIN)/horovodrun -np 2 $(BIN)/python -m tfbig.train --strategy=horovod --steps=$(MORE)
	$(BIN)/python -m tfbig.evaluate --run $(RUN)
	$(BIN)/python -m tfbig.generate --run $(RUN) --prompt '$(PROMPT)'

# The tests come last: pytest's closing line is the last word.
test: lint types tests

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

# First what runs in one process, a file on each of two cores, then what starts several.
tests: $(STAMP)
	$(BIN)/python -m pytest -m 'not distributed' --numprocesses=2 --dist=loadfile
	$(BIN)/python -m pytest -m distributed

# PyPI's PyTorch for Linux on x86 is a CUDA build of some GB. Where another index offers the build
# for CPUs, TORCH_INDEX names it: make TORCH_INDEX=https://download.pytorch.org/whl/cpu test-interop
TORCH_INDEX ?=
INTEROP_STAMP := $(VENV)/.tfbig-interop-ready
setup-interop: $(INTEROP_STAMP)

$(INTEROP_STAMP): $(STAMP)
	@echo "make: installing PyTorch, transformers and lm-evaluation-harness into $(VENV)"
	@$(BIN)/python -m pip install -qq $(TORCH_INDEX:%=--extra-index-url=%) \
	  torch==2.13.0 --editable '.[cpu,test,interop,evaluation]'
	@touch $@

test-interop: $(INTEROP_STAMP)
	$(BIN)/python -m pytest tests/interop/test_transformers.py tests/interop/test_lm_evaluation.py \
	  tests/examples/test_summarisation.py

# Hosts made of network namespaces, mpirun, the image, a browser: root, and Debian's packages.
SYSTEM_PROGRAMS := chromium:chromium ip:iproute2 sshd:openssh-server ssh:openssh-client \
  mpirun:openmpi-bin buildah:buildah debootstrap:debootstrap
setup-system: $(STAMP)
	@test "$$(id -u)" = 0 || { echo "make: test-system needs root: sudo make test-system" >&2; exit 2; }
	@missing=; for pair in $(SYSTEM_PROGRAMS); do PATH="$$PATH:/usr/sbin:/sbin" \
	  command -v "$${pair%%:*}" >/dev/null || missing="$$missing $${pair##*:}"; done; \
	test -z "$$missing" || { command -v apt-get >/dev/null || { \
	  echo "make: test-system needs these of Debian's packages:$$missing" >&2; exit 2; }; \
	  echo "make: installing$$missing"; apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; }

test-system: setup-system
	TFBIG_SYSTEM_TESTS=1 $(BIN)/python -m pytest tests/system tests/serving/test_page.py

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV)
