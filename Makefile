# One entry point. `setup` skips what is done, so every target that needs it simply depends on it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# sudo drops the folder where rustup puts cargo.
export PATH := $(PATH):$(HOME)/.cargo/bin
BIN := .venv/bin
TARGET := $(shell uname -m)-unknown-linux-gnu
CARGO := cd native && cargo
# Most tests wait for processes; more workers than cores keep the cores busy.
JOBS ?= $(shell expr $$(nproc) + 2)
PYTEST_ARGS ?=

.PHONY: help setup tools demo test check fmt gen lock bench licences clean-host

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup: ## everything a fresh machine needs (root); skips what is done
	@scripts/setup.sh

tools: # the part of setup that needs no root: the virtual environment
	@scripts/setup.sh tools

demo: setup ## 64 sandboxes, each with an agent that repairs a project
	@$(BIN)/python -m dsec.cli.demo

test: setup ## all tests on the real kernel (root)
	@$(CARGO) test --quiet --locked --target $(TARGET)
	@$(BIN)/pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

check: tools ## linters, types, import rules, generated code, licences
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --diff --quiet; echo 'make fmt mends this' >&2; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@for generator in scripts/gen_*.py; do if [ -e "$$generator" ]; then $(BIN)/python "$$generator" --check; fi; done
	@$(CARGO) fmt --all --check
	@$(CARGO) clippy --quiet --locked --all-targets --target $(TARGET) -- -D warnings
	@$(BIN)/python scripts/licences.py

fmt: tools ## format Python and Rust
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format
	@$(CARGO) fmt --all

gen: tools ## regenerate what is generated
	@for generator in scripts/gen_*.py; do if [ -e "$$generator" ]; then $(BIN)/python "$$generator"; fi; done

lock: ## renew requirements.lock
	@scripts/lock.sh

bench: setup ## the benches behind SPECIFICATION.md
	@$(BIN)/dsec bench launch
	@$(BIN)/dsec bench exec

licences: tools ## licences of all dependencies
	@$(BIN)/python scripts/licences.py

clean-host: tools ## sweep what dead instances left on this host (root)
	@$(BIN)/python -m dsec.edge.sweep
