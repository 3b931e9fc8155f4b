# make up    serve the demo model on http://127.0.0.1:8080/v1 until Ctrl-C
# make test  everything a checkout needs to test itself
# make install   edgellm for every user: /opt/edgellm and /usr/local/bin/edgellm (asks for sudo)
# make bundle    dist/bundle: wheels, engine and model for boards without a network (MACHINE=aarch64, PYTHONS="3.10 3.12")
# make test-full  the same, other Pythons, and the real build, boot, browser, clients (the first time about an hour)
PYTHON  ?= python3
PROFILE ?= cpu
DEMO    := SmolLM2-135M-Instruct
VENV    := .venv
BIN     := $(VENV)/bin
SHELL   := /bin/bash

.PHONY: help setup up install bundle check test test-full boot-test dist clean

help:
	@grep -E '^# make' Makefile | sed 's/^# //'; echo 'also: setup check test-full boot-test dist clean; PROFILE=orin, MODEL=REF'

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "edgellm needs Python 3.10 or newer: make PYTHON=python3.12 (JetPack 5: sudo uv python install 3.12 --install-dir /opt/python)"; exit 69; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "python3-venv is missing: sudo apt-get install python3-venv"; exit 69; }
	@$(PYTHON) -m venv $(VENV) && test -x $@ || $(PYTHON) -m venv --clear $(VENV)  # one that was cut off gets no pip

$(VENV)/.up: $(VENV)/bin/pip pyproject.toml
	@echo "installing edgellm and the embedded engine into $(VENV) ..."
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[embedded]'
	@touch $@

$(VENV)/.dev: $(VENV)/.up
	@echo "installing what the tests need into $(VENV) ..."
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[embedded,hub,tools,nvml,dev]'
	@touch $@

setup: $(VENV)/.dev

up: $(VENV)/.up
ifeq ($(PROFILE)$(MODEL),cpu)
	@$(BIN)/edgellm model pull $(DEMO)
	@exec $(BIN)/edgellm up -p cpu -m $(DEMO)
else
	@exec $(BIN)/edgellm up -p $(PROFILE) $(if $(MODEL),-m $(MODEL))
endif

PREFIX  ?= /opt/edgellm
COMMAND ?= /usr/local/bin/edgellm
SUDO    ?= $(if $(filter 0,$(shell id -u)),,sudo)
install: $(VENV)/.up
	@$(SUDO) $(abspath $(BIN)/python) -I -m edge.service.program $(PREFIX) $(COMMAND)

MACHINE ?= $(shell uname -m)
PYTHONS ?= 3.10 3.12
bundle: setup
	@build/bundle.sh $(BIN)/python dist/bundle $(MACHINE) $(PYTHONS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: check
	tests/halves.sh "$(BIN)/python"
	tests/wheel.sh "$(BIN)/python"

# STRANGER=--quick leaves out the second `make test`, by the other user
test-full: test
	tests/pythons.sh "$(BIN)/python"
	tests/packages.sh
	$(BIN)/python -m pytest -m full
	tests/stranger.sh $(STRANGER)

# Real systemds of three ages in systemd-nspawn, and an emulated machine (qemu-system-x86, kmod, cpio); needs root, and
# fetches four small systems once. For arm64: python -m tests.boot.vm
boot-test: setup
	BOOT_SUITES="bookworm trixie bullseye vm" $(BIN)/python -m pytest -m full tests/boot

dist: setup
	$(BIN)/python -m build

clean:
	rm -rf dist .venv .venv-3.* .mypy_cache .ruff_cache .hypothesis
