# Every target installs what it needs first: a fresh clone and `make train` are enough.

SHELL  := bash
VENV   := .venv
PEERS  := .venv-peers
DOCS   := .venv-docs
BIN    := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# Another build of torch: make setup TORCH='torch==2.15.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.15.0
OLDEST = torch==2.13.0

# One thread per rank: ranks share the cores of the machine.
export OMP_NUM_THREADS ?= 1

# Ranks of tests are forked from a process that computes, which with a GPU in sight does not work.
test test-all test-peers failures reference idioms report checkpoints chaos mutants zoo: export CUDA_VISIBLE_DEVICES =

# The torch-free layers, which mypy holds to its strict rules.
PURE = $(wildcard src/rotorch/core src/rotorch/pipelining src/rotorch/planner src/rotorch/run_config.py \
          src/rotorch/run_data.py \
          src/rotorch/strategies/__init__.py src/rotorch/strategies/*/plan.py src/rotorch/strategies/*/schedule.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-all test-oldest test-peers failures reference idioms report docs checkpoints chaos mutants test-gpu check zoo bench bars pages bench-links bench-gpu clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.installed ## make .venv with everything in it (again only when pyproject.toml or constraints.txt changed)

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "setup: rotorch needs Python 3.11 or newer; name one with: make setup PYTHON=/path/to/python3"; exit 2; }
	@echo "setup 1/3: $(VENV) from $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "setup: $(PYTHON) cannot make a virtual environment (on Debian: apt install python3-venv)"; exit 2; }
	@echo "setup 2/3: $(TORCH)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check $(TORCH)
	@echo "setup 3/3: rotorch and its other dependencies"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c <(grep -v '^torch==' constraints.txt) -e '.[dev]'
	@touch $@
	@echo "setup: done"

train: ARGS = configs/demo.toml --nproc 2
train: setup ## train the demo on 2 ranks; make train ARGS="my.toml --nproc 4" for another run
	@$(BIN)/rotorch train $(ARGS)

PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 8
# These load TRL and Lightning. A process that has both takes 69 ms to fork, one without them 45 (2 cores): they go apart.
WITH_TRAINERS = tests/hf tests/adapters

test: setup ## run the tests, as many at a time as there are cores; make test ARGS="-k rotate" for some of them
	@$(PYTEST) -m "not slow" $(if $(ARGS),$(ARGS),$(WITH_TRAINERS:%=--ignore=%)) && code=0 || code=$$?; \
	   $(if $(ARGS),,$(PYTEST) -m "not slow" $(WITH_TRAINERS) || code=$$?;) exit $$code

test-all: setup ## run the tests, and those that repeat on more cells what others prove, and test-peers
	@$(PYTEST) $(if $(ARGS),$(ARGS),$(WITH_TRAINERS:%=--ignore=%)) && code=0 || code=$$?; \
	   $(if $(ARGS),,$(PYTEST) $(WITH_TRAINERS) || code=$$?;) exit $$code
	@$(MAKE) --no-print-directory test-peers

# What `make test` skips where a package is missing, with the torch that it was tried with. Here they are all installed,
# so a test that is skipped fails.
WITH_PEERS = tests/train/test_object_store.py \
             tests/train/test_measure_tasks.py \
             tests/clusters/test_ray.py \
             tests/drop_in/test_foreign_models.py \
             tests/bench/test_grid_benchmarks.py::test_megatron_core_is_held_to_one_process \
             tests/bench/test_peers.py::test_other_libraries_train_as_one_process

test-peers: $(PEERS)/.installed ## run what other tests skip: DeepSpeed, Accelerate, Megatron-Core, Ray, lm-eval, S3 (installs them apart)
	@ROTORCH_NOTHING_SKIPPED=1 $(PEERS)/bin/python -m pytest -rs $(WITH_PEERS)

# `===`: PyPI's own build. The torchvision that timm needs comes from there, and does not load beside a CPU build.
$(PEERS)/.installed: pyproject.toml constraints.txt constraints-peers.txt
	@test -n "$(PYTHON)" || { echo "test-peers: rotorch needs Python 3.11 or newer; name one with PYTHON=/path/to/python3"; exit 2; }
	@echo "test-peers 1/2: $(PEERS) and $(OLDEST)"
	@$(PYTHON) -m venv $(PEERS) && $(PEERS)/bin/python -m pip install -qq --disable-pip-version-check '$(subst ==,===,$(OLDEST))'
	@echo "test-peers 2/2: rotorch, DeepSpeed, Accelerate, Megatron-Core, Ray, lm-eval, s3fs and moto"
	@$(PEERS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-peers.txt \
	   -c <(grep -v -E '^(torch|python-dateutil)==' constraints.txt) -e '.[dev,peers,ray,s3-test,lm-eval]'
	@touch $@

test-oldest: ## the same tests with the oldest torch that is supported, in .venv-oldest
	@$(MAKE) --no-print-directory test VENV=.venv-oldest TORCH=$(OLDEST)

failures: setup ## write docs/failures.md and docs/bad_inputs.md: what a user sees of each, as its test sees it
	@ROTORCH_WRITE_FAILURES=1 $(BIN)/python -m pytest -q $$(grep -rl "failures import\|import bad_inputs" tests --include="test_*.py")
	@$(BIN)/python -m pytest -q tests/train/test_failure_page.py

reference: setup ## write docs/reference.md, docs/run.schema.json and docs/strategies/ from the code
	@$(BIN)/python docs/make_reference.py
	@$(BIN)/python docs/make_strategies.py

docs: $(DOCS)/.installed ## build the pages of docs/ as a site in site/; make docs ARGS=serve shows it while you write
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs $(if $(ARGS),$(ARGS),build --strict --quiet)

# Only what pyproject.toml lists under `docs`: pages are built from files, so neither torch nor rotorch is needed.
$(DOCS)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "docs: needs Python 3.11 or newer; name one with: make docs PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt $$($(PYTHON) -c \
	   'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

idioms: setup ## write docs/idioms.md: loops as people write them under every layout, exact or refused
	@ROTORCH_WRITE_IDIOMS=1 $(BIN)/python -m pytest -q tests/drop_in/test_idioms.py -k every_idiom
	@$(BIN)/python -m pytest -q tests/drop_in/test_idioms.py

report: setup ## draw the pictures of reports, traces and schedules in docs/: two short runs, in Chromium (2 minutes)
	@ROTORCH_WRITE_REPORT=1 $(BIN)/python -m pytest -q -n 0 tests/report/*_in_browser.py -k picture

checkpoints: setup ## write the tables of docs/checkpoints.md: every layout going on from every other (15 minutes)
	@ROTORCH_WRITE_CHECKPOINTS=1 $(BIN)/python -m pytest -q tests/train/test_resharding.py tests/bench/test_saving.py

chaos: setup ## hurt 100 runs in ways that follow from a seed, and write docs/chaos.md (40 minutes; goes on where it was)
	@PYTHONPATH=tests/train $(BIN)/python tests/chaos/make_chaos.py $(ARGS)

mutants: setup ## see whether tests notice 200 changed lines, one at a time: docs/mutants.md (hours; goes on where it was)
	@nice -n 5 $(BIN)/python tests/mutants/make_mutants.py $(ARGS)

test-gpu: setup ## run the tests that need a GPU, which ranks share
	@$(BIN)/python -m pytest tests/gpu $(ARGS)

check: setup ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(PURE)
	@$(BIN)/mypy --config-file tests/mypy_calls.ini src/rotorch

zoo: setup ## hold a tiny model of every architecture in transformers against one process (an hour; goes on where it was)
	@$(BIN)/rotorch zoo --cache benchmarks/results/zoo.jsonl --out docs/models.md $(ARGS)

bench: setup ## measure our layouts beside other libraries, case by case; make bench ARGS="llama-h384-2ranks-*" for some
	@$(BIN)/rotorch suite configs/bench/suite.toml $(ARGS)

bars: setup ## measure what must hold beside other libraries, of speed and of memory; exits with 1 if anything does not
	@$(BIN)/rotorch suite configs/bench/bars.toml --out benchmarks/results/bars $(ARGS)

pages: setup ## write the tables of README.md and docs/ from the records in benchmarks/results
	@$(BIN)/python benchmarks/pages.py $(ARGS)

bench-links: setup ## rotation between hosts (network namespaces) on links as slow as its compute; needs root or user namespaces
	@$(BIN)/python benchmarks/links.py --emulate $(ARGS)

bench-gpu: setup ## what rotation holds, computes and costs on one GPU; without one it says so and does nothing
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

clean: ## remove .venv, caches and build output (runs/ stays)
	rm -rf $(VENV) .venv-oldest $(PEERS) $(DOCS) site .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
